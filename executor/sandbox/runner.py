"""Runs blocks in a sandboxed process; nothing of the blocks is in the worker.

The process may say anything. So each answer is checked against what a block can say there: a location that is still to come, rows
of the shape that the model needs. An answer that no block gives ends the process and fails its invoke, and nothing else.

Size: all that the worker believes of a block's turns is checked in one place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from executor.block.barrier import Barrier
from executor.block.runner import Runner
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.location import COMPUTED, Kind, Location
from executor.core.text import clip
from executor.model.apply import Applier
from executor.model.read_only import ReadOnly
from executor.model.shapes import Shapes
from executor.model.tree import ModuleTree
from executor.model.values import Fixed, Served
from executor.sandbox import channel
from executor.sandbox.answer import USUAL
from executor.sandbox.calls import Calls
from executor.sandbox.codec import Malformed
from executor.sandbox.errors import refusal_of, told_of
from executor.sandbox.far_names import FarNames
from executor.sandbox.line import Question
from executor.sandbox.planned import PlannedSteps, Room
from executor.sandbox.process import Lost
from executor.sandbox.recorder import FarRecorder
from executor.sandbox.structure import describe, rebuild, tensors_in
from executor.sandbox.trace import SandboxedTrace
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

_ENDINGS = {ended.value: ended for ended in (Ended.DONE, Ended.STOPPED, Ended.FAILED, Ended.CANCELLED)}
_MOST_RECORDERS = 1000  # of one block
_MOST_CALLS = 1000  # modules that a block asks for in one turn, all of them refused


class SandboxRunner(Runner):
    """Runs one block in the process of its trace.

    Args:
        state: the block's state.
        trace: the block's trace.
        tree: the model's modules.
        applier: applies modules to the block's values.
        room: what the plans of all sandboxed blocks may take; None: no step runs as a plan.
    """

    def __init__(
        self,
        state: BlockState,
        trace: SandboxedTrace,
        tree: ModuleTree,
        applier: Applier,
        room: Room | None = None,
    ) -> None:
        super().__init__(state)
        self._trace = trace
        self._tree = tree
        self._calls = Calls(tree, applier)
        self._key = state.identity.request_id
        self._names = FarNames(self._key, trace.leave)
        self._begun = False
        self._announced: Question | None = None  # that a step begins, before it has begun
        self._brought = True  # whether the block's changes at its location are here
        self._planned = PlannedSteps(state, tree, lambda kind, told: self._ask(kind, {**self._where(), **told}), room)
        trace.notices.emits[self._key] = self._print

    @property
    def names(self) -> FarNames:
        return self._names

    @property
    def lends_names(self) -> bool:
        return False

    @property
    def alive(self) -> bool:
        return self._begun and self._trace.open and self._state.ending.ended is None

    @property
    def own_process(self) -> bool:
        return self._trace.lone  # other blocks of the trace have the same process, which answers one question at a time

    def start(self) -> None:
        self._turn(channel.Kind.START, {})

    def serve(self, served: Served) -> None:
        self.begin_serve(served)()

    def begin_serve(self, served: Served) -> Callable[[], None]:
        if self._planned.running:
            error = self._guarded(lambda: self._planned.serve(served))
            if error is not None:  # of an operation: it is the block's own
                self.throw(error)
            return _over
        self._planned.see(served)
        served.counted = True
        tensors = served.given()
        kinds = {Fixed: "fixed", ReadOnly: "read only", Shapes: "shapes"}
        told = {
            "how": next((how for kind, how in kinds.items() if isinstance(served, kind)), "served"),
            "location": served.location,
            "value": describe(served.value, tensors),
            "tensors": tensors,
            "why": served.why if isinstance(served, ReadOnly) else "",
        }
        return self._begin(channel.Kind.SERVE, told)

    def _guarded(self, do: Callable[[], Any]) -> Any:
        """Return what a call of the plan's gives; None if the process fails the block meanwhile."""
        progress, used, began = self._state.progress, self._state.progress.used, time.monotonic()
        try:
            return do()
        except Lost as lost:
            self._fail(self._trace.lose(lost, self._state.identity.invoke))
        except Exception as error:  # a value that does not travel
            self.cancel()
            self._fail(self._failure_of(error))
        finally:
            progress.used = used + time.monotonic() - began
        return None

    def resume(self, value: Any) -> None:
        self.begin_resume(value)()

    def begin_resume(self, value: Any) -> Callable[[], None]:
        at = self._state.waits.location
        if value is not True or at is None or at.kind != Kind.STEP:
            self._guarded(self._planned.land)
        elif self._guarded(lambda: self._planned.begin(at.step)):
            return _over
        if not self._state.live:
            return _over
        ends = at is not None and at.kind == Kind.RESULT
        given = None if ends else value
        tensors = tensors_in(given)
        return self._begin(channel.Kind.RESUME, {"value": describe(given, tensors), "tensors": tensors, "ends": ends})

    def announce(self) -> None:
        state = self._state
        at, progress = state.waits.location, state.progress
        if not state.live or progress.finished or self._announced is not None:
            return
        coming = {**self._where(), "step": progress.step + 1, "position": -1, "used": 0.0, "settles": True}
        if not self._begun:
            self._announced = self._trace.post(channel.Kind.START, coming, 0.0)
        elif at is not None and at.kind == Kind.STEP and at.step == progress.step + 1 and self._planned.over:
            asked = {**coming, "value": describe(True, ()), "tensors": [], "ends": False}
            self._announced = self._trace.post(channel.Kind.RESUME, asked, 0.0)

    def throw(self, error: BaseException) -> None:
        self._guarded(self._planned.land)
        if self._state.live:
            self._turn(channel.Kind.THROW, {"error": told_of(error)})

    def bring_changes(self) -> None:
        if self._brought:
            return
        self._brought = True
        try:
            answer = self._ask(channel.Kind.SETTLE, {})
            if set(answer) != {"changed", "value", "misfit"}:
                raise Lost("its answer lacks something")
            self._settle(answer, moved=True)
        except Lost as lost:
            self._fail(self._trace.lose(lost, self._state.identity.invoke))
        except Exception as error:
            self._fail(self._failure_of(error))

    def cancel(self) -> None:
        self._planned.drop()
        trace = self._trace
        if trace.lone:
            trace.end()
        elif trace.open and trace.here:
            try:
                trace.ask(channel.Kind.CANCEL, {"block": self._key}, 0.0)
            except Lost as lost:
                trace.lose(lost, self._state.identity.invoke)

    def let_go(self, do: Callable[[], object]) -> None:
        ending, invoke = self._state.ending, self._state.identity.invoke
        try:
            do()
        except Lost as lost:
            failure = self._trace.lose(lost, invoke)
        except Refusal as error:
            failure = pb.Failure(code=error.code, message=clip(error.message), trace_id=self._trace.id, invoke=invoke)
        else:
            return
        if ending.failure is None:
            ending.ended, ending.failure = Ended.FAILED, failure

    def record(self, number: int, told: dict[str, Any]) -> dict[str, Any]:
        """Give a recorder of the block a value; return the process's answer.

        Args:
            number: of the recorder.
            told: as of `executor.sandbox.hosted.HostedBlock.record`.

        Raises:
            Refusal: the process is lost.
        """
        try:
            return self._ask(channel.Kind.RECORD, {"recorder": number, **told})
        except Lost as lost:
            failure = self._trace.lose(lost, self._state.identity.invoke)
            raise Refusal(failure.code, failure.message) from None

    def _ask(self, kind: channel.Kind, told: dict[str, Any]) -> dict[str, Any]:
        """Ask the process something of the block; the time counts as the block's own."""
        progress, began = self._state.progress, time.monotonic()
        try:
            return self._trace.ask(kind, {"block": self._key, **told}, progress.used, self._routed)
        finally:
            progress.used += time.monotonic() - began

    def _routed(self, told: Any) -> dict[str, Any]:
        """Return which experts a router chooses for the block's rows."""
        served = self._state.progress.served
        tensors = [] if served is None else served.given()
        return self._calls.routed(told, tensors[0].shape[0] if tensors else 0)

    def _print(self, text: str) -> None:
        self._state.record.logs += self._state.emit(text)

    def _turn(self, kind: channel.Kind, told: dict[str, Any]) -> None:
        """Let the block run until it waits or ends."""
        self._begin(kind, told)()

    def _begin(self, kind: channel.Kind, told: dict[str, Any]) -> Callable[[], None]:
        """Let the block run; return what waits until the block waits or has ended.

        The time until that call is not the block's: the worker does other things.
        """
        state = self._state
        state.ran("block", state.record.tally.why)
        self._begun = True
        # Others of a barrier may still use what the block was served: its changes are brought when that is over.
        settles = state.waits.barrier is None
        used, began = state.progress.used, time.monotonic()
        question = self._post(kind, told, settles)
        state.progress.used = used + time.monotonic() - began
        return lambda: self._end(question, settles)

    def _post(self, kind: channel.Kind, told: dict[str, Any], settles: bool) -> Question:
        asked = {**self._where(), "settles": settles, **told}
        announced, self._announced = self._announced, None
        if announced is None:
            return self._trace.post(kind, asked, self._state.progress.used)
        if kind is not announced.kind or {**asked, "used": 0.0} != announced.told:  # another turn has come
            announced.failed = Lost("the step that it was told of has not begun")
        return announced

    def _end(self, question: Question, settles: bool) -> None:
        """Wait until the block waits or has ended."""
        state = self._state
        used, began = state.progress.used, time.monotonic()
        try:
            for _ in range(_MOST_CALLS):
                answer = self._trace.answer(question, state.progress.used, self._routed)
                error = self._take(answer, settles)
                if error is None:
                    return
                state.progress.used = used + time.monotonic() - began
                question = self._post(channel.Kind.THROW, {"error": told_of(error)}, settles)
            raise Lost("it asked for modules without an end")
        except Lost as lost:
            self._fail(self._trace.lose(lost, state.identity.invoke))
        except Exception as error:  # a value that does not travel
            self.cancel()
            self._fail(self._failure_of(error))
        finally:
            state.progress.used = used + time.monotonic() - began

    def _failure_of(self, error: Exception) -> pb.Failure:
        """Return the failure of the block by an error of the worker's."""
        identity = self._state.identity
        known = error if isinstance(error, Refusal) else None
        if known is None:
            logger.exception("a turn of a sandboxed block could not be taken", exc_info=error)
        return pb.Failure(
            code=pb.ERROR_CODE_ENGINE if known is None else known.code,
            message=clip(
                str(error) if known is not None else f"the worker could not serve the block: {type(error).__name__}"
            ),
            location="" if known is None else known.location,
            trace_id=identity.trace_id,
            invoke=identity.invoke,
        )

    def _fail(self, failure: pb.Failure) -> None:
        self._planned.drop()
        ending, waits = self._state.ending, self._state.waits
        ending.ended, ending.failure = Ended.FAILED, failure
        waits.location = waits.call = waits.barrier = None

    def _where(self) -> dict[str, Any]:
        """Return where the request is, as the process is told with each turn."""
        progress = self._state.progress
        result = progress.result if progress.finished else None
        plain = [one.to_plain() for one in result] if isinstance(result, list) else result and result.to_plain()
        return {
            "block": self._key,
            "step": progress.step,
            "position": progress.position,
            "used": progress.used,
            "finished": progress.finished,
            "prompt_tokens": progress.prompt_tokens,
            "result": plain,
            "broken": self._trace.broken,
        }

    def _take(self, answer: dict[str, Any], settles: bool) -> Refusal | None:
        """Believe an answer as far as a block could have given it.

        Args:
            answer: the answer.
            settles: whether it has the block's changes, if the block has gone on from its location.

        Returns:
            Why the module that the block wants cannot be applied, if so; the block is told.

        Raises:
            Lost: no block gives that answer.
        """
        if not answer.keys() <= USUAL.keys():
            raise Lost("its answer has something more")
        answer = {**USUAL, **answer}
        state = self._state
        ended = answer["ended"]
        failure = self._trace.failure_in(answer["failure"], state.identity.invoke)
        if (ended is not None and ended not in _ENDINGS) or (failure is not None) != (ended == Ended.FAILED):
            raise Lost("it ended in a way that there is not")
        waits = None if ended is not None or answer["waits"] is None else self._location(answer["waits"])
        if ended is None and (waits is None) == (answer["call"] is None):
            raise Lost("it waits for nothing")
        barrier = self._barrier(answer["barrier"], waits)
        self._skip(answer["skips"])
        self._begin_recorders(answer["recorders"])
        stays = answer["call"] is not None or barrier is not None or not settles
        self._settle(answer, moved=not stays and failure is None)
        self._brought = not stays
        state.waits.location, state.waits.call, state.waits.barrier = waits, None, barrier
        state.waits.result_asked = answer["asked"] is True
        if ended is not None:
            state.ending.ended, state.ending.failure = _ENDINGS[ended], failure
            return None
        if answer["call"] is not None:
            try:
                state.waits.call = self._calls.of(answer["call"])
            except Refusal as error:
                return error
        return None

    def _location(self, told: Any) -> Location:
        """Return a location that the block may wait for."""
        form = isinstance(told, tuple) and [type(item) for item in told] == [str, str, int, str]
        if not form or not 0 <= told[2] < 1 << 40 or max(map(len, (told[0], told[3]))) > 1000:
            raise Lost("it waits for no location")
        path, kind, ahead, shown = told
        progress = self._state.progress
        if progress.finished:
            raise Lost("it waits for what cannot come")
        if kind == Kind.BARRIER and not path:
            return Location("", Kind.BARRIER, 0, shown)
        if kind == Kind.RESULT and not path:
            return Location("", Kind.RESULT, 0)
        step = progress.step + ahead
        if kind == Kind.STEP:
            if path or not ahead:
                raise Lost("it waits for a step that has passed")
            return Location("", Kind.STEP, step)
        if kind not in (Kind.INPUT, Kind.OUTPUT, *COMPUTED) or self._tree.find(path) is None:
            raise Lost("it waits for no location")
        try:
            position = self._tree.order_of(path, kind)
        except Refusal:
            raise Lost("it waits for a location that no forward reaches") from None
        if (step, position) <= (progress.step, progress.position):
            raise Lost("it waits for a location that has passed")
        return Location(path, Kind(kind), step, shown)

    def _barrier(self, told: Any, waits: Location | None) -> Barrier | None:
        """Return the barrier that the block waits at.

        Raises:
            Lost: no block waits there.
        """
        if (told is not None) != (waits is not None and waits.kind == Kind.BARRIER):
            raise Lost("it waits at a barrier that there is not")
        if told is None:
            return None
        identity = self._state.identity
        form = isinstance(told, tuple) and [type(item) for item in told] == [int, int]
        if not form or not identity.gang or identity.joint or identity.edit:
            raise Lost("it waits at a barrier that there is not")
        return self._trace.barrier(*told)

    def _begin_recorders(self, told: Any) -> None:
        """Note what the block wants recorded from here on."""
        recorders = self._state.record.recorders
        if not isinstance(told, list) or len(told) + len(recorders) > _MOST_RECORDERS:
            raise Lost("it records what there is not")
        for one in told:
            if self._state.identity.edit or self._trace.streamed:
                raise Lost("it records what there is not")
            recorders.append(FarRecorder.of(one, self._tree, len(recorders), self.record))

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
        if isinstance(served, Shapes):
            raise Lost("it changed the shapes of a scan")
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


def _over() -> None:
    """Do nothing: the turn is over."""
