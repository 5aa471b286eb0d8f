"""A worker without an engine: a small model, an interleaver, and sandboxed processes."""

from __future__ import annotations

import ast
import textwrap
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.block.budget import Budget
from executor.block.tally import Precision
from executor.core.ended import Ended
from executor.core.programs import made, units_of
from executor.core.request import Batch, InvokeRequest, Opened, Span
from executor.interleave.context import Host
from executor.interleave.interleaver import Interleaver
from executor.model.kv_guard import CacheGuard
from executor.model.tree import ModuleTree
from executor.parallel.agreement import Alone
from executor.parallel.pipeline import OneStage
from executor.sandbox.pool import Pool
from executor.sandbox.skeleton import Skeleton
from executor.sandbox.zygote import Setup
from executor.saves.collect import Limits
from executor.saves.outbox import LocalOutbox
from interpose.capture.analysis import block_reads_writes
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import Encoder

ROWS, WIDTH = 3, 8
STEP_SECONDS = 4.0
MEMORY_BYTES, SAVED_BYTES = 256 << 20, 16 << 20


class Layer(torch.nn.Module):
    """A layer that returns a pair, as those of many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:  # [rows, width]
        return self.linear(hidden).tanh(), None


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [rows, width]
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden


MODEL = Model()


def tree() -> ModuleTree:
    """Return the model's modules, with the order in which they run."""
    made_here = ModuleTree(MODEL, 1)
    made_here.record_order(lambda: MODEL(torch.ones(ROWS, WIDTH)))
    return made_here


def pool(ready: int = 2) -> Pool:
    """Return the processes of a worker that has the model; the caller closes it."""
    made_here = Pool(ready)
    made_here.start(Setup(Skeleton.of(tree()), (WIDTH, WIDTH), MEMORY_BYTES, SAVED_BYTES))
    return made_here


@dataclass
class BlockRun:
    """How a block ended.

    Attributes:
        saved: its saved values by name.
        failure: why it failed.
        logs: what it printed.
        outputs: what the model made of the block's rows in each step, [rows, width].
        beside: what the model made of the rows of the request beside it.
        ended: how it ended.
        increments: of a streamed trace.
        accounting: what it used.
    """

    saved: dict[str, Any] = field(default_factory=dict)
    failure: pb.Failure | None = None
    logs: str = ""
    outputs: list[torch.Tensor] = field(default_factory=list)
    beside: list[torch.Tensor] = field(default_factory=list)
    ended: Ended | None = None
    increments: list[pb.Increment] = field(default_factory=list)
    accounting: pb.Accounting | None = None


def program_of(source: str, captured: dict[str, Any], encoder: Encoder) -> pb.Program:
    """Return a block as a notebook would send it; `model` and `tracer` are the model's and the trace's."""
    source = textwrap.dedent(source).strip("\n") + "\n"
    reads, writes = block_reads_writes(ast.parse(source).body)
    program = pb.Program(source=source, filename="<block>", first_line=1, writes=writes)
    own = {"tracer": Value(tracer=True), "model": Value(module="")}
    for name in reads:
        if name in own:
            program.reads.append(Binding(name=name, value=own[name]))
        elif name in captured:
            program.reads.append(Binding(name=name, value=encoder.encode(captured[name])))
    return program


class Worker:
    """One worker's interleaver, and the model that it runs.

    Args:
        sandboxes: its sandboxed processes.
        step_seconds: wall time that a block may take in one step.
        plans: whether steps of blocks run as plans.

    Attributes:
        budget: what a block may take.
    """

    def __init__(self, sandboxes: Pool | None, step_seconds: float = STEP_SECONDS, plans: bool = False) -> None:
        self.tree = tree()
        self.budget = Budget(step_seconds, MEMORY_BYTES)
        nothing: Any = None
        self.outbox = LocalOutbox()
        self.interleaver = Interleaver(
            Host(
                self.tree,
                nothing,
                self.budget,
                self.outbox,
                Limits(1 << 10, SAVED_BYTES),
                Alone(),
                OneStage(),
                True,
                Precision(torch.float32, torch.float32, "", "highest"),
                10,
                CacheGuard({}),
                plans=plans,
                sandbox_plans=plans,
                sandboxes=sandboxes,
            )
        )

    def run(
        self, source: str, steps: int = 2, trusted: bool = False, stream: bool = False, **captured: Any
    ) -> BlockRun:
        """Run a block for so many steps, with the rows of a plain request after its own.

        On cores that have much to do, a process may not be there in time. Then the block is run again, as a client would.
        """
        for _ in range(30):
            ran = self.run_once(source, steps, trusted, stream, **captured)
            if ran.failure is None or ran.failure.code != pb.ERROR_CODE_UNAVAILABLE:
                break
        return ran

    def run_once(
        self, source: str, steps: int = 2, trusted: bool = False, stream: bool = False, **captured: Any
    ) -> BlockRun:
        """Run a block as `run` does, once."""
        encoder = Encoder(inline_bytes=1 << 10, put_blob=self._upload)
        # The same block has the same id, from which its random numbers follow.
        trace = pb.Trace(id=f"t{zlib.crc32(source.encode())}", stream=stream, stacks=True)
        self.outbox.logs.clear()
        self.outbox.increments.clear()
        trace.invokes.add(program=program_of(source, captured, encoder))
        trace.scope.CopyFrom(encoder.objects)
        codes = {unit.key: made(unit, 1 << 20) for unit in units_of(trace)}
        ran, key = BlockRun(), f"{trace.id}-0"
        self.interleaver.open(Opened(trace, "", codes, trusted))
        self.interleaver.admit(key, InvokeRequest(trace.id, 0), ROWS, 0)
        for step in range(steps):
            self._step(ran, key, ROWS if step == 0 else 1, step)
        _, events, _ = self.interleaver.finish(trace.id, 0, Result("said", [1] * steps))
        ran.logs = "".join(text for trace_id, _, text in self.outbox.logs if trace_id == trace.id)
        self._read(ran, trace.id, [pb.Event.FromString(event) for event in events])
        assert self.interleaver.idle
        return ran

    def _upload(self, data: memoryview) -> str:
        name = f"upload-{len(self.outbox.uploads)}"
        self.outbox.uploads[name] = bytes(data)
        return name

    def _step(self, ran: BlockRun, key: str, rows: int, step: int) -> None:
        spans = {key: Span(0, 0, rows)} if self.interleaver.waits(key) else {}
        hidden = torch.linspace(-1, 1, (rows + 2) * WIDTH).view(rows + 2, WIDTH) + step
        with torch.inference_mode():
            if spans:
                if len(key) % 2 and self.interleaver.announces:  # an engine announces the steps of all traces
                    self.interleaver.announce(spans)
                self.interleaver.begin_step(Batch(spans, rows + 2, rows + 2, 2))
            made_here = MODEL(hidden.clone())
            if spans:
                self.interleaver.end_forward()
                self.interleaver.end_step()
        ran.ended = self.interleaver.take_ended().get(key, ran.ended)
        ran.outputs.append(made_here[:rows].clone())
        ran.beside.append(made_here[rows:].clone())

    def _read(self, ran: BlockRun, trace_id: str, events: list[pb.Event]) -> None:
        for event in events:
            kind = event.WhichOneof("kind")
            if kind == "failed":
                ran.failure = event.failed
            elif kind == "saves":
                decoder = Decoder(event.saves.objects, get_blob=lambda blob: self.outbox.blobs[blob.id])
                ran.saved.update({one.name: decoder.decode(one.value) for one in event.saves.names})
            elif kind == "accounting":
                ran.accounting = event.accounting
            elif kind == "increment":
                ran.increments.append(event.increment)
        sent = [pb.Event.FromString(data).increment for one, data in self.outbox.increments if one == trace_id]
        ran.increments[:0] = sent


def plain() -> list[torch.Tensor]:
    """Return what the model makes of the rows beside a block in two steps."""
    return Worker(None).run("x = 1", trusted=True).beside
