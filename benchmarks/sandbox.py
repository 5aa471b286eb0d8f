"""Measure what a sandboxed process costs a block, against a greenlet in the worker.

A block reads one layer in each step and changes all its rows. A turn is everything between the value at the layer and the changed
value there. The begin of a trace is the time from the admission of its block to the first wait. The figures are microseconds of
wall time, medians over the turns. No engine runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from executor.block.api import Program
from executor.block.budget import Budget
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.scope import TraceScope
from executor.block.state import BlockState, Progress, Record
from executor.block.uploads import Uploads
from executor.core.programs import Code, Codes, made, units_of
from executor.core.request import Opened
from executor.model.apply import Applier
from executor.model.layouts import WHOLE
from executor.model.rows import Rows
from executor.model.skips import Skips
from executor.model.tree import ModuleTree
from executor.model.values import Served
from executor.parallel.agreement import Alone
from executor.sandbox.pool import Pool
from executor.sandbox.runner import SandboxRunner
from executor.sandbox.skeleton import Skeleton
from executor.sandbox.trace import SandboxedTrace, Terms
from executor.sandbox.zygote import Setup
from executor.saves.collect import Limits
from executor.saves.registry import SaveRegistry
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value

WIDTH = 2048
ROWS = (1, 8, 128, 1024)  # of float32: 8 KiB to 8 MiB
BEGINS = 20
ROUNDS = 200
SECONDS, MEMORY_BYTES = 60.0, 1 << 30
SOURCE = "for step in tracer.iter[:]:\n    model.layers[0].output[:] *= 1.0001\n"


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH)])

    def forward(self, hidden: torch.Tensor) -> Any:  # [rows, width]
        return self.layers[0](hidden)


def run(*, rounds: int | None = None) -> dict[str, dict[str, float]]:
    """Return microseconds for each turn by the rows' bytes, and for the begin of a trace.

    Args:
        rounds: turns of each case.
    """
    model = _Model()
    tree = ModuleTree(model, 1)
    tree.record_order(lambda: model(torch.ones(1, WIDTH)))
    pool = Pool()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        pool.start(Setup(Skeleton.of(tree), (WIDTH, WIDTH), MEMORY_BYTES, MEMORY_BYTES))
        return _figures(tree, pool, rounds or ROUNDS)
    finally:
        pool.close()
        gc.unfreeze()
        torch.set_num_threads(threads)


def _figures(tree: ModuleTree, pool: Pool, rounds: int) -> dict[str, dict[str, float]]:
    makes = {"greenlet": lambda: _in_worker(tree), "sandbox": lambda: _in_sandbox(tree, pool)}
    figures: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        figures[f"{rows * WIDTH * 4 >> 10} KiB"] = {
            name: _turns(make, tree, rows, rounds) for name, make in makes.items()
        }
    figures["begin"] = {name: _begins(make) for name, make in makes.items()}
    for row in figures.values():
        row["more"] = row["sandbox"] - row["greenlet"]
    return figures


def _turns(make: Callable[[], tuple[Mediator, Any]], tree: ModuleTree, rows: int, rounds: int) -> float:
    """Return the median microseconds of a turn at the layer."""
    mediator, scope = make()
    mediator.begin_step()
    mediator.start()
    value = torch.randn(rows, WIDTH)
    seconds = []
    with torch.inference_mode():
        for step in range(rounds):
            if step:
                mediator.begin_step()
                mediator.resume(True)
            at = mediator.state.waits.location
            assert at is not None, mediator.state.ending.failure
            began = time.perf_counter()
            served = Served(str(at), value, Rows(0, rows, rows, rows), lambda path: WHOLE)
            mediator.serve(served, at, tree.order_of(at.path, at.kind))
            value = served.settle(value)
            mediator.left()
            seconds.append(time.perf_counter() - began)
    mediator.cancel()
    scope.let_go()
    return statistics.median(seconds) * 1e6


def _begins(make: Callable[[], tuple[Mediator, Any]]) -> float:
    """Return the median microseconds from a trace's admission to its block's first wait."""
    seconds = []
    for _ in range(BEGINS):
        began = time.perf_counter()
        mediator, scope = make()
        mediator.begin_step()
        mediator.start()
        seconds.append(time.perf_counter() - began)
        assert mediator.state.waits.location is not None
        mediator.cancel()
        scope.let_go()
        time.sleep(0.1)  # the pool is full again
    return statistics.median(seconds) * 1e6


def _trace() -> tuple[pb.Trace, dict[str, Code]]:
    trace = pb.Trace(id="trace")
    program = trace.invokes.add().program
    program.source, program.filename, program.first_line = SOURCE, "<block>", 1
    program.reads.append(Binding(name="tracer", value=Value(tracer=True)))
    program.reads.append(Binding(name="model", value=Value(module="")))
    return trace, {unit.key: made(unit, 1 << 20) for unit in units_of(trace)}


TRACE, CODES = _trace()


def _state(tree: ModuleTree, registry: SaveRegistry) -> BlockState:
    return BlockState(Identity("request", "trace", 0), registry, lambda text: True, Progress(1), Record(Skips(tree)))


def _in_worker(tree: ModuleTree) -> tuple[Mediator, TraceScope]:
    """Return a block that runs as a greenlet."""
    budget = Budget(SECONDS, MEMORY_BYTES)
    scope = TraceScope(TRACE, 1, "", tree, Uploads(lambda blob: b""), budget, Codes(CODES))
    code, names = scope.program(TRACE.invokes[0].program, ())
    state = _state(tree, scope.registry)
    program = Program(code, names, scope.sources.lines)
    return Mediator(state, GreenletRunner(state, program, tree, cast(Applier, None), Bounds(budget))), scope


def _in_sandbox(tree: ModuleTree, pool: Pool) -> tuple[Mediator, SandboxedTrace]:
    """Return a block that runs in a process of its own."""
    nothing: Any = None
    terms = Terms(SECONDS, MEMORY_BYTES, Limits(1 << 14, 1 << 30), nothing, nothing, nothing)
    scope = SandboxedTrace(Opened(TRACE, "", CODES), pool.take(), Alone(), terms, 0)
    state = _state(tree, scope.registry)
    key = state.identity.request_id
    scope.begin([{"key": key, "invoke": 0, "prompt_tokens": 1, "gang": 0, "joint": False}])
    return Mediator(state, SandboxRunner(state, scope, tree, cast(Applier, None))), scope
