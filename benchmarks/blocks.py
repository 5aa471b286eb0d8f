"""Blocks for an engine in the same process, from their source to the end of their request."""

from __future__ import annotations

import ast
import itertools
from typing import Any

from interpose.capture.analysis import block_reads_writes
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value
from interpose.wire.encoder import Encoder
from interpose.wire.request import TraceRequest

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
}

_ids = itertools.count()


class TracedRequest:
    """One run of a block, as one request.

    Args:
        name: one of `BLOCKS`.
        captured: values that the block reads besides `model` and `tracer`, by name.
    """

    def __init__(self, name: str, **captured: Any) -> None:
        source = BLOCKS[name]
        reads, writes = block_reads_writes(ast.parse(source).body)
        program = pb.Program(source=source, filename=f"<{name}>", first_line=1, writes=writes)
        encoder = Encoder(inline_bytes=1 << 20, put_blob=_too_large)
        values = {"model": Value(module=""), "tracer": Value(tracer=True)}
        for read in reads:
            if read in values:
                program.reads.append(Binding(name=read, value=values[read]))
            elif read in captured:
                program.reads.append(Binding(name=read, value=encoder.encode(captured[read])))
        self._trace = pb.Trace(id=f"benchmark-{next(_ids)}", invokes=[pb.Invoke(program=program)], stacks=True)
        self._trace.scope.CopyFrom(encoder.objects)

    def extra_args(self) -> dict[str, Any]:
        """Return the request's `SamplingParams.extra_args`."""
        from executor.core.request import InvokeRequest

        request = TraceRequest(self._trace.SerializeToString(), key=self._trace.id)
        return InvokeRequest.alone(request).to_args()

    def finish(self, worker: Any, output: Any) -> None:
        """End the block after its request, and drop its saved values.

        Args:
            worker: the engine's only worker.
            output: the request's output.

        Raises:
            RuntimeError: the block failed.
        """
        completion = output.outputs[0]
        result = Result(
            completion.text, list(completion.token_ids), completion.finish_reason or "", list(output.prompt_token_ids)
        )
        state, events, _ = worker.interpose_finish(self._trace.id, 0, vars(result))
        if state != "done":
            raise RuntimeError(
                f"a benchmark's block ended as {state}: {[pb.Event.FromString(data) for data in events]}"
            )
        worker.interpose_outbox.blobs.clear()


def _too_large(data: memoryview) -> str:
    raise ValueError(f"{data.nbytes} bytes are too many for a benchmark's block")
