"""A module is called by another one than it is a part of: its caller's output comes after it, and is served."""

from __future__ import annotations

from pathlib import Path

import torch

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Block, LocalEngine

MLP = "model.model.layers[1].mlp"


def test_the_experts_of_a_mixture_call_the_router_and_the_shared_expert(tmp_path: Path) -> None:
    """Both are parts of the layer's MLP; a block reads them, and then what the experts give, to the end of the layer."""
    shape = Shape(layers=2, hidden=128, context=256)
    checkpoint = write_demo_model(tmp_path / "mixture", "qwen3_moe", shape)
    options = {"hf_overrides": {"shared_expert_intermediate_size": 256}, "load_format": "dummy", "dtype": "float32"}
    engine = LocalEngine(checkpoint, max_model_len=shape.context, **options)
    try:
        for inner in (f"{MLP}.gate.output[0]", f"{MLP}.shared_expert.act_fn.output", f"{MLP}.shared_expert.output"):
            source = f"inner = {inner}.save()\nout = {MLP}.experts.output.save()\nwhole = {MLP}.output.save()"
            [ran] = engine.run(Block([5, 400, 17], source))
            assert ran.failure is None, (inner, ran.failure)
            assert ran.saved["inner"].shape[0] == 3
            assert torch.equal(ran.saved["out"], ran.saved["whole"])
        source = f"{MLP}.shared_expert.output[:] = 0\n{MLP}.experts.output[:] = 1\nwhole = {MLP}.output.save()"
        [changed] = engine.run(Block([5, 400, 17], source))
        assert changed.failure is None, changed.failure
        assert bool((changed.saved["whole"] == 1).all())
    finally:
        engine.close()
