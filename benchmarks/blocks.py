"""Blocks for an engine in the same process; `benchmarks.traced_batch` runs them."""

from __future__ import annotations

# Blocks for a llama of 8 layers. Its layers return the pair (hidden, residual).
BLOCKS = {
    "capture one layer, prompt": """\
hidden = model.model.layers[4].output[0].save()
""",
    "capture one layer, all steps": """\
kept = []
for step in tracer.iter[:]:
    kept.append(model.model.layers[4].output[0].save())
""",
    "capture all layers, all steps": """\
kept = []
for step in tracer.iter[:]:
    for layer in model.model.layers:
        kept.append(layer.output[0].save())
""",
    "steer one layer, all steps": """\
for step in tracer.iter[:]:
    model.model.layers[4].output[0][:] += vector
""",
    "each step": """\
for step in tracer.iter[:]:
    pass
""",
    "read one layer, all steps": """\
for step in tracer.iter[:]:
    model.model.layers[4].output
""",
    "read all layers, all steps": """\
for step in tracer.iter[:]:
    for layer in model.model.layers:
        layer.output
""",
    "steer all layers, all steps": """\
for step in tracer.iter[:]:
    for layer in model.model.layers:
        layer.output[0][:] += vector
""",
}
