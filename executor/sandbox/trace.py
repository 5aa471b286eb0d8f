"""A sandboxed trace: what the worker asks of its process, and what it believes of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from executor.block.barrier import Barrier
from executor.block.scope import Scope, Sent
from executor.block.state import BlockState
from executor.core.errors import Refusal
from executor.core.request import Opened
from executor.core.text import clip
from executor.parallel.agreement import Ranks
from executor.sandbox.channel import Kind
from executor.sandbox.far_names import FarNames, FarShared
from executor.sandbox.line import Line, Question, Routed, no_router
from executor.sandbox.notices import Notices
from executor.sandbox.process import Lost, Process
from executor.saves.collect import Limits
from executor.saves.registry import SaveRegistry
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Value
from interpose.wire.walk import blob_of, parts

_CODES = frozenset(pb.ErrorCode.values())
_SENT = ("saves", "failed")
_MOST_EVENT = 64 << 20  # bytes
_MOST_BARRIERS = 10_000  # of one trace
_ANOTHER = "the sandboxed process of the trace was ended, which another block of the trace brought about"


@dataclass(frozen=True)
class Terms:
    """What the blocks of a worker are bounded by.

    Attributes:
        step_seconds: wall time that a block may take in one step.
        memory_bytes: how much it may let its process grow in one step.
        limits: bounds on what is saved.
        get_blob: returns the bytes of an uploaded value, by the session, the trace and the value's id.
        increment: takes a serialized event with an increment, of a session's trace.
        put: takes the bytes of a blob, of a session's trace.
    """

    step_seconds: float
    memory_bytes: int
    limits: Limits
    get_blob: Callable[[str, str, str], Any]
    increment: Callable[[str, str, bytes], None]
    put: Callable[[str, str, str, memoryview], None]


class SandboxedTrace(Scope):
    """A trace whose values are in a sandboxed process.

    Size: the trace is all that the worker knows of the process.

    Args:
        opened: the trace.
        process: the process, which has served no trace; None where another rank has it.
        ranks: the ranks that run the trace.
        terms: bounds, and the ways to the session.
        arrival: how many traces came to this worker before.

    Attributes:
        lone: whether the process has one block, and ends with it.
        keys: the keys of the blocks that were begun, by invoke.
        notices: takes what the process says beside its answers.
        streamed: whether saves leave step by step.
    """

    def __init__(self, opened: Opened, process: Process | None, ranks: Ranks, terms: Terms, arrival: int) -> None:
        trace = opened.trace
        self.id = trace.id
        self.expected = len(trace.invokes)
        self.session = opened.session
        self.arrival = arrival
        self.registry = SaveRegistry()
        self.recorded_bytes = 0
        self.shared = self._shared = FarShared()
        self.lone = self.expected == 1 and not trace.applied
        self.keys: dict[int, str] = {}
        get = terms.get_blob
        self.notices = Notices(
            self.id, self.expected, terms.limits, lambda blob: get(self.session, self.id, blob), self._named
        )
        self.streamed = trace.stream
        self._opened = opened
        self._line = Line(process, ranks, self.notices, terms.step_seconds)
        self._terms = terms
        self._barriers: dict[int, Barrier] = {}
        self._known = False  # whether the process has the trace
        self._gave = False  # whether an invoke's saves have been sent
        self._lost: pb.Failure | None = None
        self._sequences: Counter[int] = Counter()  # increments that have come, by invoke

    @property
    def barriers(self) -> dict[int, Barrier]:
        return self._barriers

    @property
    def open(self) -> bool:
        """Whether the process can still be asked."""
        return self._line.open

    @property
    def here(self) -> bool:
        """Whether this rank has the process."""
        return self._line.here

    @property
    def broken(self) -> dict[int, str]:
        """Why no block can pass a barrier any more, by the barriers' numbers."""
        return {number: barrier.broken for number, barrier in self._barriers.items() if barrier.broken}

    def barrier(self, number: int, count: int) -> Barrier:
        """Return a barrier of the trace.

        Raises:
            Lost: the trace cannot have that barrier.
        """
        known = self._barriers.get(number)
        if known is None:
            if not 0 <= number < 1 << 31 or not 1 < count < 1 << 31 or len(self._barriers) >= _MOST_BARRIERS:
                raise Lost("it waits at a barrier that there is not")
            known = self._barriers[number] = Barrier(number, count, _no_wait)
        if known.count != count:
            raise Lost("it waits at a barrier that there is not")
        return known

    def _named(self) -> frozenset[str]:
        """Return the ids of the uploaded values that the trace names."""
        return frozenset(_blobs_in(self._opened.trace))

    def begin(self, blocks: list[dict[str, Any]]) -> dict[str, pb.Failure]:
        """Bind blocks of the trace; return why some could not be bound, by key.

        Args:
            blocks: of each block its `key`, `invoke`, `prompt_tokens`, `gang`, and whether it is `joint`.
        """
        terms, opened = self._terms, self._opened
        told = {
            "trace": None if self._known else opened.trace.SerializeToString(),
            "codes": None if self._known else opened.codes,
            "blocks": blocks,
            "step_seconds": terms.step_seconds,
            "memory_bytes": terms.memory_bytes,
            "inline_bytes": terms.limits.inline_bytes,
            "max_saved_bytes": terms.limits.max_saved_bytes,
        }
        keys = [one["key"] for one in blocks]
        try:
            answer = self.ask(Kind.OPEN, told, 0.0)
            found = answer.get("failures")
            if not isinstance(found, dict) or not found.keys() <= set(keys):
                raise Lost("it bound no blocks")
            self._known = self._known or answer.get("opened") is True
            failures = {key: self.failure_in(data) for key, data in found.items()}
            return {key: failure for key, failure in failures.items() if failure is not None}
        except Lost as error:
            failure = self.lose(error)
            return {key: pb.Failure.FromString(failure.SerializeToString()) for key in keys}

    def ask(self, kind: Kind, told: dict[str, Any], used: float, routed: Routed = no_router) -> dict[str, Any]:
        """Ask the process something, as of `Line.ask`."""
        return self._line.ask(kind, told, used, routed, self._increment)

    def post(self, kind: Kind, told: dict[str, Any], used: float) -> Question:
        """Send the process a question, as of `Line.post`."""
        return self._line.post(kind, told, used)

    def answer(self, question: Question, used: float, routed: Routed) -> dict[str, Any]:
        """Return the answer to a question, as of `Line.answer`."""
        return self._line.answer(question, used, routed, self._increment)

    def end(self) -> None:
        """End the process. Idempotent."""
        self._line.end()

    def lose(self, error: Lost, invoke: int = 0) -> pb.Failure:
        """End the process, which can be asked nothing any more.

        Args:
            error: why.
            invoke: whose block asked.

        Returns:
            The failure of that block.
        """
        failure = self._failure_of(error, invoke)
        if self._lost is None:
            self._lost = failure
        self._line.end(lost=True)
        self.end()
        return failure

    # What the process says.

    def _increment(self, data: Any, invoke: int) -> None:
        [event] = self._events([data], ("increment",), invoke)
        self._put_blobs()
        self._terms.increment(self.session, self.id, event.SerializeToString())

    def numbered(self, increment: pb.Increment) -> pb.Event:
        """Return the event of an invoke's next increment, with the worker's own number."""
        increment.sequence = self._sequences[increment.invoke]
        self._sequences[increment.invoke] += 1
        return pb.Event(increment=increment)

    def _put_blobs(self) -> None:
        for blob_id, bytes_ in self.notices.take_blobs():
            self._terms.put(self.session, self.id, blob_id, bytes_)

    def _events(self, found: Any, kinds: tuple[str, ...], invoke: int) -> list[pb.Event]:
        """Return events from their bytes.

        Args:
            invoke: whose events they are; -1: the whole trace's.

        Raises:
            Lost: they are no such events, or another trace's.
        """
        if not isinstance(found, list) or len(found) > 2:
            raise Lost("it sent no events")
        events = []
        for data in found:
            if not isinstance(data, bytes) or len(data) > _MOST_EVENT:
                raise Lost("it sent an event that is too large, or none")
            try:
                event = pb.Event.FromString(data)
            except Exception:
                raise Lost("it sent no event") from None
            kind = event.WhichOneof("kind")
            if kind not in kinds:
                raise Lost(f"it sent an event of the kind {kind}")
            if kind == "failed":
                event = pb.Event(failed=self._checked(event.failed, invoke))
            elif kind == "increment":
                if event.increment.invoke != invoke:
                    raise Lost("it sent another invoke's increment")
                event = self.numbered(event.increment)
            elif kind == "saves" and event.saves.invoke != invoke:
                raise Lost("it sent another invoke's saves")
            events.append(event)
        return events

    def failure_in(self, data: Any, invoke: int = 0) -> pb.Failure | None:
        """Return a failure from its bytes, None if there is none.

        Raises:
            Lost: it is no failure.
        """
        if data is None:
            return None
        try:
            return self._checked(pb.Failure.FromString(data), invoke)
        except Exception:
            raise Lost("it sent no failure") from None

    def _checked(self, failure: pb.Failure, invoke: int) -> pb.Failure:
        """Return a failure as this trace may have it."""
        failure.trace_id, failure.invoke = self.id, invoke
        if failure.code not in _CODES or failure.code == pb.ERROR_CODE_UNSPECIFIED:
            failure.code = pb.ERROR_CODE_INTERVENTION
        for name in ("message", "location", "exception_type", "exception_message"):
            setattr(failure, name, clip(getattr(failure, name)))
        return failure

    def _failure_of(self, error: Lost, invoke: int) -> pb.Failure:
        code, message = pb.ERROR_CODE_INTERVENTION, f"the sandboxed process of the block was ended: {error}"
        if self._lost is not None:
            code, message = self._lost.code, f"{_ANOTHER}: {self._lost.message}"
        elif error.orphaned:
            code, message = (
                pb.ERROR_CODE_UNAVAILABLE,
                f"the sandboxed process of the block has ended: {error}; submit it again",
            )
        elif error.overdue:
            code = pb.ERROR_CODE_DEADLINE_EXCEEDED
            message = (
                f"the block ran longer than the {self._terms.step_seconds:g} s it may take in one step; end its loop, or do the "
                "work in the notebook after the trace"
            )
        return pb.Failure(code=code, message=clip(message), trace_id=self.id, invoke=invoke)

    # What the worker asks of a trace.

    def leave(self, names: MutableMapping[str, Any], lends: bool) -> None:
        """Drop an ended block in the process.

        Raises:
            Lost: the process is gone, or took too long.
            Refusal: objects of the block's ran too long when they went.
        """
        assert isinstance(names, FarNames)
        if self.lone or not self._known:
            return
        answer = self.ask(Kind.LEAVE, {"block": names.block, "export": self._exports(names.block)}, 0.0)
        failure = self.failure_in(answer.get("failure"))
        if failure is not None:
            raise Refusal(failure.code, failure.message)

    def _exports(self, block: str) -> bool:
        """Return whether an ended block's names are to be kept; the process is told once."""
        here = block in self._shared.exports
        self._shared.exports.discard(block)
        return here

    def let_go(self) -> None:
        self.end()

    def saved(self, invoke: int, names: Mapping[str, Any], used: float, limits: Limits) -> Sent:
        key = self.keys[invoke]
        sent = self._sent(Kind.SAVES, {"block": key, "export": self._exports(key)}, used, invoke)
        self._gave = self._gave or self.open
        return sent

    def given_back(self, limits: Limits) -> Sent:
        if not self.open and not self._gave:
            return [], []
        return self._sent(Kind.SHARED, {}, 0.0, -1)

    def _sent(self, kind: Kind, told: dict[str, Any], used: float, invoke: int) -> Sent:
        try:
            if not self._known:
                return [], []
            events = self._events(self.ask(kind, told, used).get("events"), _SENT, invoke)
        except Lost as error:
            return [pb.Event(failed=self.lose(error, invoke))], []
        return events, self.notices.take_blobs()

    def increments(
        self, state: BlockState, steps: int, last: bool, final: bool
    ) -> tuple[list[pb.Event], pb.Failure | None, bool]:
        """Have the process send what is new of a block.

        Returns:
            The last increment if it is `final`, why nothing more is sent, and whether the request goes on.
        """
        identity, progress, began = state.identity, state.progress, time.monotonic()
        if not self.open:
            return [], None, False
        told = {"block": identity.request_id, "invoke": identity.invoke, "steps": steps, "last": last, "final": final}
        try:
            answer = self.ask(Kind.STREAM, told, progress.used)
            events = self._events(answer.get("events"), ("increment",), identity.invoke)
            failure = self.failure_in(answer.get("failure"), identity.invoke)
        except Lost as error:
            return [], self.lose(error, identity.invoke), False
        finally:
            progress.used += time.monotonic() - began
        self._put_blobs()
        return events, failure, answer.get("on") is True


def _no_wait(barrier: Barrier) -> None:
    raise AssertionError("no block waits in the worker")


def _blobs_in(trace: pb.Trace) -> Iterator[str]:
    """Yield the ids of the blobs that a trace names."""
    todo: list[Value] = [*trace.scope.values, *(binding.value for binding in trace.shared)]
    for invoke in trace.invokes:
        todo.extend(binding.value for binding in invoke.program.reads)
    while todo:
        value = todo.pop()
        todo.extend(parts(value))
        blob = blob_of(value)
        if blob is not None:
            yield blob.id
        elif value.WhichOneof("kind") == "remote":
            yield value.remote.blob_id
