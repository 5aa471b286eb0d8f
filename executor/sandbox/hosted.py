"""One block in a sandboxed process, and what the worker is told after each of its turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.block.cache import Recorder
from executor.block.greenlet_runner import GreenletRunner
from executor.block.mediator import Mediator
from executor.block.scope import TraceScope
from executor.core.errors import Refusal
from executor.core.location import Kind, Location
from executor.core.text import clip
from executor.model.call import Call
from executor.model.layouts import WHOLE
from executor.model.meta_tensors import Fakes
from executor.model.plain import check_plain
from executor.model.read_only import ReadOnly
from executor.model.rows import Rows
from executor.model.shapes import Shapes
from executor.model.values import Fixed, Served
from executor.sandbox.errors import told_of
from executor.sandbox.planner import Planner
from executor.sandbox.stand_ins import SandboxedBlock, ToldSkips
from executor.sandbox.structure import build, describe, replaces
from executor.saves.stream import SaveStream
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb

Changes = tuple[dict[int, torch.Tensor], Any, tuple[Any, ...] | None]
_UNCHANGED: Changes = ({}, None, None)


class HostedBlock:
    """One block of the process.

    Args:
        mediator: drives the block.
        runner: runs the block's code.
        scope: the trace, or the standing edit, that the block belongs to.
        writes: the names that the block may give to other invokes, and save.

    Attributes:
        mediator, runner, scope, writes: as given.
        stream: sends what a streamed trace's block saves; None for any other block.
        planner: makes plans of the block's loop; None: there are none.
    """

    def __init__(self, mediator: Mediator, runner: GreenletRunner, scope: TraceScope, writes: list[str]) -> None:
        self.mediator = mediator
        self.runner = runner
        self.scope = scope
        self.writes = writes
        self.stream: SaveStream | None = None
        self.planner: Planner | None = None
        code = runner.block
        assert isinstance(code, SandboxedBlock)
        self._code = code
        self._given: Any = None  # the containers of the value that the block was served last
        self._count = 0  # and the number of its tensors

    def turn(self, told: dict[str, Any], turn: Callable[[], None]) -> dict[str, Any]:
        """Let the block run until it waits or ends; return what the worker is told.

        Args:
            told: where the request is, and whether the block's changes at its location are told now.
            turn: lets the block run.
        """
        mediator, shared = self.mediator, self.scope.shared
        gang = mediator.identity.gang > 0
        self._move(told)
        if shared or gang:
            mediator.let_go(lambda: shared.give(mediator.names, gang))
            turn()
            mediator.let_go(lambda: shared.take(mediator.names, gang))
        else:
            turn()
        return self.answer(told["settles"])

    def _move(self, told: dict[str, Any]) -> None:
        """Take over where the request is."""
        progress = self.mediator.state.progress
        progress.step, progress.position, progress.used = told["step"], told["position"], told["used"]
        progress.finished, progress.prompt_tokens = told["finished"], told["prompt_tokens"]
        result = told["result"]
        if result is not None:
            results = [Result.from_plain(one) for one in result] if isinstance(result, list) else None
            progress.result = Result.from_plain(result) if results is None else results
        for number, why in told["broken"].items():
            if number in self.scope.barriers:
                self.scope.barriers[number].broken = why

    def serve(self, told: dict[str, Any]) -> dict[str, Any]:
        """Give the block the value that it waits for."""
        mediator = self.mediator
        at = mediator.state.waits.location
        assert at is not None
        tensors, self._given = told["tensors"], told["value"]
        self._count = len(tensors)
        value = build(told["value"], tensors)
        rows = tensors[0].shape[0] if tensors else 0
        served = _served(told["how"], told["location"], value, rows, told["why"], mediator.state.fakes)
        if self.planner is not None and told["how"] == "served":
            self.planner.see(served)
        return self.turn(told, lambda: mediator.serve(served, at, told["position"]))

    def resume(self, told: dict[str, Any]) -> dict[str, Any]:
        """Let the block go on with what it waits for, which is no location."""
        value = build(told["value"], told["tensors"])
        progress = self.mediator.state.progress
        passed = None if self.planner is None else self.planner.step()
        if passed is not None and value is True:
            value = passed
        return self.turn(told, lambda: self.mediator.resume(progress.result if told["ends"] else value))

    def plan(self, told: dict[str, Any]) -> dict[str, Any]:
        """Return a plan of the loop where the block waits, as of `Planner.offer`."""
        if self.planner is None:
            return {"plan": None, "until": 0, "why": "blocks like this one have no plans", "later": False}
        self._move(told)
        return self.planner.offer(told["most_bytes"])

    def land(self, told: dict[str, Any]) -> dict[str, Any]:
        """Give the block what the steps of its plan left."""
        assert self.planner is not None
        self.planner.land(told)
        return {"landed": True}

    def answer(self, settles: bool = True) -> dict[str, Any]:
        """Return what the worker is told after a turn, as of `executor.sandbox.answer`.

        Args:
            settles: whether that covers what the block changed at its location.
        """
        state = self.mediator.state
        waits, ending, skips = state.waits, state.ending, state.record.skips
        stays = not settles or waits.call is not None or (waits.barrier is not None and ending.ended is None)
        changed, value, misfit = _UNCHANGED if stays else self.changes()
        assert isinstance(skips, ToldSkips)
        begun, skips.begun = skips.begun, []
        recorders, self._code.begun = self._code.begun, []
        at, barrier = waits.location, waits.barrier
        told: dict[str, Any] = {}
        if at is not None:
            told["waits"] = self._told(at)
        if ending.ended is not None:
            told["ended"] = ending.ended.value
        elif barrier is not None:
            told["barrier"] = barrier.number, barrier.count
        if waits.call is not None and ending.ended is None:
            told["call"] = _call(waits.call)
        if ending.failure is not None:
            told["failure"] = ending.failure.SerializeToString()
        if waits.result_asked:
            told["asked"] = True
        if changed:
            told["changed"] = changed
        if value is not None:
            told["value"] = value
        if misfit is not None:
            told["misfit"] = misfit
        if begun:
            told["skips"] = begun
        if recorders:
            told["recorders"] = list(map(_wished, recorders))
        return told

    def _told(self, at: Location) -> tuple[str, str, int, str]:
        """Return the location that the block waits for, with the number of steps until then."""
        step = 0 if at.kind in (Kind.BARRIER, Kind.RESULT) else at.step - self.mediator.state.progress.step
        return str(at.path), str(at.kind), step, at.shown

    def changes(self) -> Changes:
        """Leave the location that the block has gone on from.

        Returns:
            The tensors that the block changed in place, by number; what it put in their places, None if nothing; and why that
            does not fit, None if it does as far as can be seen here.
        """
        state = self.mediator.state
        served, at = state.progress.served, state.progress.served_at
        if served is None:
            return _UNCHANGED
        try:
            if state.ending.failure is not None or state.fakes is not None:
                return _UNCHANGED
            check_plain(served.value, str(at))
            changed = served.changes()
            told = describe(served.value, served.given()[: self._count])
            return changed, told if replaces(told) or told != self._given else None, None
        except Exception as error:
            message = f"what was assigned at {at} does not fit: {error}"
            misfit = Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=str(at))
            return {}, None, told_of(error if isinstance(error, Refusal) else misfit)
        finally:
            self.mediator.left()

    def settle(self, told: dict[str, Any]) -> dict[str, Any]:
        """Tell what the block changed at its location, which the model leaves."""
        changed, value, misfit = self.changes()
        return {"changed": changed, "value": value, "misfit": misfit}

    def record(self, told: dict[str, Any]) -> dict[str, Any]:
        """Take a value that the block has recorded, or the reason why it is not given."""
        state = self.mediator.state
        recorder = state.record.recorders[told["recorder"]]
        before = recorder.bytes
        error: Exception | None = None
        if told["why"]:
            recorder.cache.refused.setdefault(told["path"], told["why"])
        else:
            path, kind, tensors = told["path"], told["kind"], told["tensors"]
            how = "served" if state.fakes is None else "shapes"
            rows = tensors[0].shape[0] if tensors else 0
            served = _served(how, f"{path}.{kind}", build(told["value"], tensors), rows, "", state.fakes)
            try:
                recorder.record(path, kind, told["step"], served.value)
            except Exception as refused:
                error = refused
        return {"bytes": recorder.bytes - before, "error": None if error is None else told_of(error)}

    def cancel(self, told: dict[str, Any]) -> dict[str, Any]:
        """End the block wherever it is."""
        if self.mediator.state.live:
            self.mediator.cancel()
        self.mediator.left()
        return {}

    def export(self) -> None:
        """Keep what the block bound for invokes that read it."""
        self.scope.shared.export(self.mediator.identity.invoke, self.mediator.names, self.writes)

    def leave(self) -> pb.Failure | None:
        """Drop the block's names; return why that failed."""
        mediator, ending = self.mediator, self.mediator.state.ending
        failed = ending.failure
        edit = bool(mediator.identity.edit)
        mediator.let_go(
            mediator.names.clear if edit else lambda: self.scope.leave(mediator.names, mediator.lends_names)
        )
        if edit:
            self.scope.let_go()
        return None if failed is not None else ending.failure

    def failure_of(self, error: Refusal) -> pb.Failure:
        """Return the failure of the block by an error that is at no line of its own."""
        identity = self.mediator.identity
        return pb.Failure(
            code=error.code,
            message=clip(error.message),
            location=error.location,
            trace_id=identity.trace_id,
            invoke=identity.invoke,
        )


def _served(how: str, location: str, value: Any, rows: int, why: str, fakes: Fakes | None) -> Served:
    """Return a location's value for the block, as the worker would make it."""
    if how == "fixed":
        return Fixed(location, value)
    mine = Rows(0, rows, rows, rows)
    if how == "read only":
        return ReadOnly(location, value, mine, lambda path: WHOLE, why)
    if how == "shapes" and fakes is not None:
        return Shapes(location, value, mine, lambda path: WHOLE, fakes.like)
    return Served(location, value, mine, lambda path: WHOLE)


def _call(call: Call) -> tuple[Any, ...]:
    """Return a module to apply, or a weight to read, as plain values."""
    if call.wanted is not None:
        rows = call.wanted.rows
        return "weight", call.node.path, call.wanted.name, None if rows is None else list(rows)
    return "apply", call.node.path, list(call.args), dict(call.kwargs)


def _wished(recorder: Recorder) -> tuple[Any, ...]:
    """Return the locations that a recorder wants, whether they were named, and the line."""
    wish = recorder.wish
    line = pb.Failure(code=pb.ERROR_CODE_INVALID_ARGUMENT, frames=wish.frames).SerializeToString()
    return [(path, str(kind)) for path, kind in wish.targets], wish.named, line
