"""An interleaver without an engine, driven by hand: blocks may wait for steps and for the result, and reach no module."""

from __future__ import annotations

import ast
import gc
import textwrap
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from executor.block.budget import Budget
from executor.block.tally import Precision
from executor.core.programs import units_of
from executor.core.request import Batch, InvokeRequest, Opened, Span
from executor.interleave.context import Host
from executor.interleave.interleaver import Interleaver
from executor.model.kv_guard import CacheGuard
from executor.model.tree import ModuleTree
from executor.parallel.agreement import Alone
from executor.parallel.pipeline import OneStage
from executor.saves.collect import Limits
from executor.saves.outbox import LocalOutbox
from interpose.capture.analysis import block_reads_writes
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value
from interpose.wire.decoder import Decoder
from tests.engine.harness import compile_here

MODEL = torch.nn.ModuleDict({"layer": torch.nn.Identity()})


@dataclass
class BlockRun:
    """How a block ended: its saved values by name, its failure, and the longest time that the worker was away for it."""

    saved: dict[str, Any] = field(default_factory=dict)
    failure: pb.Failure | None = None
    seconds: float = 0.0


class Worker:
    """One worker's interleaver.

    Args:
        step_seconds: that a block may take in one step.
    """

    def __init__(self, step_seconds: float = 0.3) -> None:
        tree: Any = ModuleTree(MODEL, 1)
        nothing: Any = None
        precision = Precision(torch.float32, torch.float32, "", "highest")
        self.budget = Budget(step_seconds, 512 << 20)
        limits = Limits(1 << 20, 1 << 24)
        self.interleaver = Interleaver(
            Host(
                tree,
                nothing,
                self.budget,
                LocalOutbox(),
                limits,
                Alone(),
                OneStage(),
                True,
                precision,
                10,
                CacheGuard({}),
            )
        )
        self._count = 0
        gc.collect()
        gc.freeze()  # as a worker does when it has loaded its model

    def close(self) -> None:
        gc.unfreeze()

    def run(self, *sources: str, steps: int = 2, shared: tuple[str, ...] = (), stream: bool = False) -> list[BlockRun]:
        """Run the blocks of one trace side by side, for so many steps."""
        trace = pb.Trace(id=f"t{self._count}", stream=stream, stacks=True)
        self._count += 1
        for name in shared:
            trace.shared.append(Binding(name=name, value=Value(none=True)))
        for source in sources:
            source = textwrap.dedent(source).strip("\n") + "\n"
            reads, writes = block_reads_writes(ast.parse(source).body)
            program = pb.Program(source=source, filename="<block>", first_line=1, writes=writes)
            if "tracer" in reads:
                program.reads.append(Binding(name="tracer", value=Value(tracer=True)))
            trace.invokes.append(pb.Invoke(program=program))
        self.interleaver.open(Opened(trace, "", compile_here(units_of(trace))))
        ended = [BlockRun() for _ in sources]
        keys = [f"{trace.id}-{index}" for index in range(len(sources))]

        def timed(of: BlockRun, do: Any) -> Any:
            begun = time.monotonic()
            try:
                return do()
            finally:
                of.seconds = max(of.seconds, time.monotonic() - begun)

        for index, key in enumerate(keys):
            request = InvokeRequest(trace.id, index)
            timed(ended[index], lambda key=key, request=request: self.interleaver.admit(key, request, 1, 0))
        for _ in range(steps):
            spans = {key: Span(i, i, i + 1) for i, key in enumerate(key for key in keys if self.interleaver.waits(key))}
            if spans:
                timed(ended[0], lambda spans=spans: self._step(spans))
        for index, one in enumerate(ended):
            _, events, _ = timed(one, partial(self.interleaver.finish, trace.id, index, Result()))
            for event in map(pb.Event.FromString, events):
                if event.WhichOneof("kind") == "failed":
                    one.failure = event.failed
                elif event.WhichOneof("kind") == "saves":
                    decoder = Decoder(event.saves.objects, get_blob=lambda blob: b"")
                    one.saved.update({binding.name: decoder.decode(binding.value) for binding in event.saves.names})
        assert self.interleaver.idle
        return ended

    def _step(self, spans: dict[str, Span]) -> None:
        self.interleaver.begin_step(Batch(spans, len(spans), len(spans), len(spans)))
        self.interleaver.end_forward()
        self.interleaver.end_step()
        self.interleaver.take_ended()
