"""Runs a block in a sandboxed process; nothing of the block is in the worker.

The process may say anything. So each answer is checked against what a block can say there: a location that is still to come, rows
of the shape that the model needs. An answer that no block gives ends the process and fails its invoke, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from executor.block.runner import Runner
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.location import Kind, Location
from executor.core.text import clip
from executor.model.apply import Applier
from executor.model.call import Call
from executor.model.node import Node
from executor.model.parameters import Wanted
from executor.model.read_only import ReadOnly
from executor.model.remote_module import names_of
from executor.model.tree import ModuleTree
from executor.model.values import Fixed, Served
from executor.sandbox import channel
from executor.sandbox.codec import Malformed
from executor.sandbox.errors import refusal_of, told_of
from executor.sandbox.pool import Lost
from executor.sandbox.structure import describe, rebuild
from executor.sandbox.trace import SandboxedTrace
from interpose.v1 import trace_pb2 as pb

_ENDINGS = {ended.value: ended for ended in (Ended.DONE, Ended.STOPPED, Ended.FAILED, Ended.CANCELLED)}
_FIELDS = frozenset("waits asked call ended failure changed value misfit skips".split())
_MOST_CALLS = 1000  # modules that a block asks for in one turn, all of them refused


class SandboxRunner(Runner):
    """Runs one block in the process of its trace.

    Args:
        state: the block's state.
        trace: the block's trace.
        tree: the model's modules.
        applier: applies modules to the block's values.
    """

    def __init__(self, state: BlockState, trace: SandboxedTrace, tree: ModuleTree, applier: Applier) -> None:
        super().__init__(state)
        self._trace = trace
        self._tree = tree
        self._applier = applier
        self._begun = False
        trace.emit = self._print

    @property
    def names(self) -> dict[str, Any]:
        return {}

    @property
    def lends_names(self) -> bool:
        return False

    @property
    def alive(self) -> bool:
        return self._begun and self._trace.open and self._state.ending.ended is None

    def start(self) -> None:
        self._turn(channel.Kind.START, {})

    def serve(self, served: Served) -> None:
        tensors = served.given()
        how = "fixed" if isinstance(served, Fixed) else "read only" if isinstance(served, ReadOnly) else "served"
        told = {
            "how": how,
            "location": served.location,
            "value": describe(served.value, tensors),
            "tensors": tensors,
            "why": served.why if isinstance(served, ReadOnly) else "",
        }
        self._turn(channel.Kind.SERVE, told)

    def resume(self, value: Any) -> None:
        at = self._state.waits.location
        ends = at is not None and at.kind == Kind.RESULT
        self._turn(channel.Kind.RESUME, {"value": describe(None if ends else value, ()), "ends": ends})

    def throw(self, error: BaseException) -> None:
        self._turn(channel.Kind.THROW, {"error": told_of(error)})

    def cancel(self) -> None:
        self._trace.end()

    def let_go(self, do: Callable[[], object]) -> None:
        do()

    def _print(self, text: str) -> None:
        self._state.record.logs += self._state.emit(text)

    def _turn(self, kind: channel.Kind, told: dict[str, Any]) -> None:
        """Let the block run until it waits or ends."""
        state = self._state
        state.ran("block", state.record.tally.why)
        self._begun = True
        began = time.monotonic()
        used = state.progress.used
        try:
            for _ in range(_MOST_CALLS):
                state.progress.used = used + time.monotonic() - began
                answer = self._trace.ask(kind, {**self._where(), **told}, state.progress.used)
                error = self._take(answer)
                if error is None:
                    return
                kind, told = channel.Kind.THROW, {"error": told_of(error)}
            raise Lost("it asked for modules without an end")
        except Lost as lost:
            self._fail(self._trace.failure_of(lost))
        except Refusal as refused:  # a value that does not travel
            identity = state.identity
            failure = pb.Failure(code=refused.code, message=clip(refused.message), location=refused.location)
            failure.trace_id, failure.invoke = identity.trace_id, identity.invoke
            self._fail(failure)
        finally:
            state.progress.used = used + time.monotonic() - began

    def _fail(self, failure: pb.Failure) -> None:
        self._trace.end()
        ending, waits = self._state.ending, self._state.waits
        ending.ended, ending.failure = Ended.FAILED, failure
        waits.location = waits.call = None

    def _where(self) -> dict[str, Any]:
        """Return where the request is, as the process is told with each turn."""
        progress = self._state.progress
        return {
            "step": progress.step,
            "position": progress.position,
            "used": progress.used,
            "finished": progress.finished,
            "result": progress.result.to_plain() if progress.finished and progress.result is not None else None,
        }

    def _take(self, answer: dict[str, Any]) -> Refusal | None:
        """Believe an answer as far as a block could have given it.

        Returns:
            Why the module that the block wants cannot be applied, if so; the block is told.

        Raises:
            Lost: no block gives that answer.
        """
        if set(answer) != _FIELDS:
            raise Lost("its answer lacks something")
        state = self._state
        ended = answer["ended"]
        failure = self._trace.failure_in(answer["failure"])
        if (ended is not None and ended not in _ENDINGS) or (failure is not None) != (ended == Ended.FAILED):
            raise Lost("it ended in a way that there is not")
        waits = None if ended is not None or answer["waits"] is None else self._location(answer["waits"])
        if ended is None and (waits is None) == (answer["call"] is None):
            raise Lost("it waits for nothing")
        self._skip(answer["skips"])
        self._settle(answer, moved=answer["call"] is None and failure is None)
        state.waits.location, state.waits.call = waits, None
        state.waits.result_asked = answer["asked"] is True
        if ended is not None:
            state.ending.ended, state.ending.failure = _ENDINGS[ended], failure
            return None
        if answer["call"] is not None:
            try:
                state.waits.call = self._call(answer["call"])
            except Refusal as error:
                return error
        return None

    def _location(self, told: Any) -> Location:
        """Return a location that the block may wait for."""
        form = isinstance(told, tuple) and [type(item) for item in told] == [str, str, int, str]
        if not form or not 0 <= told[2] < 1 << 40 or max(map(len, (told[0], told[3]))) > 1000:
            raise Lost("it waits for no location")
        path, kind, step, shown = told
        progress = self._state.progress
        if progress.finished:
            raise Lost("it waits for what cannot come")
        if kind in (Kind.STEP, Kind.RESULT):
            if path or (kind == Kind.STEP and step <= progress.step):
                raise Lost("it waits for a step that has passed")
            return Location("", Kind(kind), step)
        if kind not in (Kind.INPUT, Kind.OUTPUT, Kind.PATTERN) or self._tree.find(path) is None:
            raise Lost("it waits for no location")
        try:
            position = self._tree.order_of(path, kind)
        except Refusal:
            raise Lost("it waits for a location that no forward reaches") from None
        if (step, position) <= (progress.step, progress.position):
            raise Lost("it waits for a location that has passed")
        return Location(path, Kind(kind), step, shown)

    def _skip(self, begun: Any) -> None:
        """Note what the block skips."""
        if not isinstance(begun, list) or len(begun) > len(self._tree.nodes):
            raise Lost("it skipped what cannot be skipped")
        for one in begun:
            form = isinstance(one, tuple) and [type(item) for item in one] == [str, int, int]
            node = self._tree.find(one[0]) if form else None
            if node is None:
                raise Lost("it skipped what cannot be skipped")
            try:
                self._state.record.skips.begin(node, one[1], one[2])
            except Refusal:
                raise Lost("it skipped what cannot be skipped") from None

    def _settle(self, answer: dict[str, Any], moved: bool) -> None:
        """Have the changes of the block written back, or refused, where its location is settled.

        Raises:
            Lost: the block was given nothing that it could have changed.
        """
        served, misfit = self._state.progress.served, answer["misfit"]
        if answer["changed"] == {} and answer["value"] is None and misfit is None:
            return
        if served is None or not moved:
            raise Lost("it changed what it was not given")
        try:
            if misfit is not None:
                served.refuse(refusal_of(misfit))
                return
            self._write(served, answer["changed"], answer["value"])
        except Refusal as error:
            served.refuse(error)
        except ValueError as error:
            raise Lost(str(error)) from None

    def _write(self, served: Served, changed: Any, value: Any) -> None:
        """Put what the block changed into the served value, from which it is written back.

        Raises:
            Lost: there is no such tensor.
            Refusal: it does not fit.
        """
        at = self._state.progress.served_at
        if not isinstance(changed, dict):
            raise Lost("it changed what it was not given")
        given = served.given()
        with torch.inference_mode(False), torch.no_grad():
            for number, tensor in changed.items():
                known = type(number) is int and 0 <= number < len(given)
                if not known or not isinstance(tensor, torch.Tensor):
                    raise Lost("it changed what it was not given")
                mine = given[number]
                if tensor.shape != mine.shape:
                    raise Refusal(
                        pb.ERROR_CODE_INVALID_ARGUMENT,
                        f"what was assigned at {at} does not fit: its shape became {list(tensor.shape)}, and the model needs "
                        f"{list(mine.shape)}",
                        location=str(at),
                    )
                mine.copy_(tensor)
            if value is not None:
                try:
                    served.assign(rebuild(value, served.value, given))
                except Malformed as error:
                    raise Lost(str(error)) from None

    def _call(self, told: Any) -> Call:
        """Return a module to apply, or a weight to read.

        Raises:
            Lost: there is no such module.
            Refusal: it cannot be applied to these values.
        """
        if not isinstance(told, tuple) or len(told) != 4 or not isinstance(told[1], str):
            raise Lost("it asked for no module")
        what, path, first, second = told
        node = self._tree.find(path)
        if node is None:
            raise Lost("it asked for no module")
        with torch.inference_mode(False), torch.no_grad():
            if what == "apply" and isinstance(first, list) and isinstance(second, dict):
                if not all(isinstance(name, str) for name in second):
                    raise Lost("it asked for no module")
                args = [self._placed(value) for value in first]
                return self._applier.prepare(
                    node, tuple(args), {name: self._placed(value) for name, value in second.items()}
                )
        if what == "weight" and isinstance(first, str):
            return self._weight(node, first, second)
        raise Lost("it asked for no module")

    def _placed(self, value: Any) -> Any:
        return value.to(self._tree.device) if isinstance(value, torch.Tensor) else value

    def _weight(self, node: Node, name: str, rows: Any) -> Call:
        """Return what reads a weight, or rows of it."""
        if node.layer is None or name not in names_of(node.layer):
            raise Lost("it asked for no weight")
        wanted: Any = self._applier.parameters.open(node, name, _itself)
        if rows is not None:
            if isinstance(wanted, Wanted) or not isinstance(rows, list) or not all(type(row) is int for row in rows):
                raise Lost("it asked for no rows of a weight")
            wanted = wanted[torch.tensor(rows, dtype=torch.int64)]  # which checks them
        if not isinstance(wanted, Wanted):
            raise Lost("it asked for a weight that is given by rows")
        return Call(node, (), {}, single=False, wanted=wanted)


def _itself(wanted: Wanted) -> Any:
    return wanted
