"""The parts that a block needs to run without an engine: a model of numbered locations, and a state."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from executor.block.api import Program
from executor.block.budget import Budget
from executor.block.fiber import current
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.runner import Runner
from executor.block.state import BlockState, Progress, Record
from executor.core.ended import Ended
from executor.core.location import Kind, Location
from executor.model.apply import Applier
from executor.model.layouts import WHOLE
from executor.model.rows import Rows
from executor.model.skips import Skips
from executor.model.tree import ModuleTree
from executor.model.values import Served
from executor.saves.registry import SaveRegistry
from interpose.v1 import trace_pb2 as pb

ROWS, WIDTH = 3, 4


class Numbered:
    """A tree of modules whose paths are their positions in a step."""

    device = torch.device("cpu")

    def order_of(self, path: str, kind: str) -> int:
        return int(path)


tree = cast(ModuleTree, Numbered())


def state(gang: int = 0) -> BlockState:
    """Return the state of a block that has not started."""
    return BlockState(
        Identity("request", "trace", 0, gang=gang),
        SaveRegistry(),
        lambda text: True,
        Progress(ROWS),
        Record(Skips(tree)),
    )


def read(position: int, step: int = 0) -> Any:
    """Return the output of a module, from inside a block."""
    block = current()
    block.pointer = step
    return block.read(cast(Any, SimpleNamespace(path=str(position), module=None)), Kind.OUTPUT)


def greenlet_block(source: str, gang: int = 0, budget: Budget | None = None, **names: Any) -> Mediator:
    """Return a mediator whose block runs `source` as a greenlet; `read` and `block` are names of the block."""
    of = state(gang)
    program = Program(compile(source, "block", "exec"), {"read": read, "block": current, "torch": torch, **names}, {})
    bounds = Bounds(budget or Budget(60.0, 1 << 34))
    return driven(of, GreenletRunner(of, program, tree, cast(Applier, None), bounds))


def driven(of: BlockState, runner: Runner) -> Mediator:
    """Return a mediator whose request's first step has begun."""
    mediator = Mediator(of, runner)
    mediator.begin_step()
    return mediator


def serve(mediator: Mediator, value: torch.Tensor) -> torch.Tensor:
    """Serve a block the location it waits for; return what the model goes on with, [rows, width]."""
    at = mediator.state.waits.location
    assert at is not None
    served = Served(str(at), value, Rows(0, ROWS, value.shape[0], value.shape[0]), lambda path: WHOLE)
    mediator.serve(served, at, int(at.path))
    with torch.inference_mode():
        settled: torch.Tensor = served.settle(value)
    mediator.left()
    return settled


def run(mediator: Mediator, change: Callable[[torch.Tensor], None] | None = None) -> list[Location]:
    """Serve a block of every location it asks for; return the locations."""
    mediator.start()
    seen = []
    while (at := mediator.state.waits.location) is not None and at.kind == Kind.OUTPUT:
        seen.append(at)
        serve(mediator, torch.ones(ROWS + 1, WIDTH))
    return seen


def failed_with(mediator: Mediator) -> pb.Failure:
    """Return the failure of a block that has failed."""
    ending = mediator.state.ending
    assert ending.ended is Ended.FAILED and ending.failure is not None
    return ending.failure
