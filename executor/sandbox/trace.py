"""A sandboxed trace: what the worker asks of its process, and what it believes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from executor.block.barrier import Barrier
from executor.block.binding import BindingFailed
from executor.block.scope import Scope, Sent
from executor.block.shared_names import SharedNames
from executor.core.errors import Refusal
from executor.core.request import Opened
from executor.core.text import clip
from executor.sandbox.channel import REGION_BYTES, Kind
from executor.sandbox.errors import told_of
from executor.sandbox.pool import Lost, Process
from executor.saves.collect import Limits
from executor.saves.registry import SaveRegistry
from interpose.v1 import trace_pb2 as pb

GRACE_SECONDS = 0.8  # beyond a block's own time, until its process is ended
_MOST_NOTICES = 200_000  # in one turn
_MOST_LOG = 4 << 20  # characters of text that the worker takes from one trace
_PIECE_SECONDS = 2.0  # for a process to send the next piece of a blob
_CODES = frozenset(pb.ErrorCode.values())
_SENT = ("saves", "failed")


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


def why_not_there(opened: Opened) -> str:
    """Return what of a trace a sandbox does not do yet; "" if it does all."""
    trace = opened.trace
    reasons = {
        "several invokes": len(trace.invokes) != 1,
        "standing edits": bool(trace.applied),
        "invokes that wait for each other": bool(trace.exchanged) or any(one.gang > 1 for one in trace.invokes),
        "invokes without a prompt": any(one.joint for one in trace.invokes),
        "scans": trace.scan,
        "explanations": trace.explain,
        "tensors that stay on the server": trace.remote,
        "variables of the session": bool(trace.variables),
    }
    return ", ".join(name for name, there in reasons.items() if there)


class SandboxedTrace(Scope):
    """A trace of one invoke whose values are in a sandboxed process.

    Size: the trace is all that the worker knows of the process.

    Args:
        opened: the trace.
        process: the process, which has served no trace.
        terms: bounds, and the ways to the session.
        arrival: how many traces came to this worker before.
    """

    def __init__(self, opened: Opened, process: Process, terms: Terms, arrival: int) -> None:
        self.id = opened.trace.id
        self.expected = 1
        self.session = opened.session
        self.arrival = arrival
        self.registry = SaveRegistry()
        self.recorded_bytes = 0
        self.shared = SharedNames(pb.Trace(), {})
        self.emit: Callable[[str], object] = lambda text: None
        self._opened = opened
        self._process = process
        self._terms = terms
        self._logged = 0
        self._saved = 0  # bytes of blobs
        self._parts: dict[str, bytearray] = {}  # the blobs that are coming
        self._blobs: list[tuple[str, memoryview]] = []

    @property
    def barriers(self) -> dict[int, Barrier]:
        return {}

    @property
    def open(self) -> bool:
        """Whether the process can still be asked."""
        return self._process.open

    def begin(self, request: str, prompt_tokens: int) -> None:
        """Bind the names of the trace's block.

        Args:
            request: the engine's id of the request.
            prompt_tokens: the length of the prompt.

        Raises:
            BindingFailed: code of the user's failed, a value cannot be made there, or the process is lost.
        """
        terms, opened = self._terms, self._opened
        told = {
            "trace": opened.trace.SerializeToString(),
            "codes": opened.codes,
            "request": request,
            "prompt_tokens": prompt_tokens,
            "step_seconds": terms.step_seconds,
            "memory_bytes": terms.memory_bytes,
            "inline_bytes": terms.limits.inline_bytes,
            "max_saved_bytes": terms.limits.max_saved_bytes,
        }
        try:
            answer = self.ask(Kind.OPEN, told, 0.0)
            failure = self.failure_in(answer.get("failure"))
        except Lost as error:
            self.end()
            raise BindingFailed(self.failure_of(error)) from None
        if failure is not None:
            raise BindingFailed(failure)

    def ask(self, kind: Kind, told: dict[str, Any], used: float) -> dict[str, Any]:
        """Ask the process something; return its answer, and take what it says before.

        Args:
            kind: the question.
            told: what goes with it.
            used: seconds that the block has used in this step already.

        Raises:
            Refusal: what goes with the question is too large.
            Lost: the process is gone, took too long, or said what it cannot say. It is to be ended then.
        """
        until = time.monotonic() + max(0.0, self._terms.step_seconds - used) + GRACE_SECONDS
        self._process.send(kind, told, until)
        for _ in range(_MOST_NOTICES):
            came, value = self._process.receive(until)
            if came is Kind.ANSWER:
                if not isinstance(value, dict):
                    raise Lost("its answer is none")
                return value
            if came is Kind.LOG:
                self._log(value)
            elif came is Kind.PIECE:
                self._take_piece(value)
                until = max(until, time.monotonic() + _PIECE_SECONDS)
                self._process.go(None, until)
            elif came is Kind.BLOB:
                self._process.go(self._blob(value), until + _PIECE_SECONDS)
            elif came is Kind.INCREMENT and kind is Kind.STREAM:
                self._increment(value)
            else:
                raise Lost(f"it sent {came.name}")
        raise Lost("it sent too many notices")

    def end(self) -> None:
        """End the process. Idempotent."""
        self._process.end()
        self._parts.clear()

    # What the process says.

    def _log(self, text: Any) -> None:
        if not isinstance(text, str):
            raise Lost("it printed no text")
        self._logged += len(text)
        if self._logged > _MOST_LOG:
            raise Lost("it printed more than a block prints")
        self.emit(text)

    def _take_piece(self, piece: Any) -> None:
        """Take a part of a blob."""
        form = isinstance(piece, tuple) and len(piece) == 3
        if not form or not isinstance(piece[0], str) or type(piece[1]) is not int or not isinstance(piece[2], bytes):
            raise Lost("it sent a piece that is none")
        blob_id, size, data = piece
        if not blob_id.startswith((f"{self.id}/0/", f"{self.id}/shared/")) or len(blob_id) > len(self.id) + 32:
            raise Lost("it sent a blob under another trace's name")
        parts = self._parts.setdefault(blob_id, bytearray())
        self._saved += len(data)
        if len(parts) + len(data) > size or self._saved > self._terms.limits.max_saved_bytes or (size and not data):
            raise Lost("it sent more bytes than it may save")
        parts += data
        if len(parts) == size:
            self._blobs.append((blob_id, memoryview(self._parts.pop(blob_id))))

    def _blob(self, blob_id: Any) -> dict[str, Any]:
        """Return the bytes of an uploaded value, or why the trace does not get them."""
        if not isinstance(blob_id, str):
            raise Lost("it asked for no value")
        try:
            data = self._terms.get_blob(self.session, self.id, blob_id)
            if memoryview(data).nbytes > REGION_BYTES:
                message = (
                    f"an uploaded value takes more than the {REGION_BYTES >> 20} MiB that a sandboxed block can bind"
                )
                raise Refusal(pb.ERROR_CODE_QUOTA_EXCEEDED, message)
        except Refusal as error:
            return {"error": told_of(error), "data": b""}
        except KeyError:
            return {"error": ("Refusal", pb.ERROR_CODE_NOT_FOUND, "no such value was uploaded", "", []), "data": b""}
        return {"error": None, "data": bytes(data)}

    def _increment(self, data: Any) -> None:
        [event] = self._events([data], ("increment",))
        self._put_blobs()
        self._terms.increment(self.session, self.id, event.SerializeToString())

    def _put_blobs(self) -> None:
        for blob_id, bytes_ in self._blobs:
            self._terms.put(self.session, self.id, blob_id, bytes_)
        self._blobs = []

    def _events(self, found: Any, kinds: tuple[str, ...]) -> list[pb.Event]:
        """Return events from their bytes.

        Raises:
            Lost: they are no such events, or another trace's.
        """
        if not isinstance(found, list) or len(found) > 2:
            raise Lost("it sent no events")
        events = []
        for data in found:
            try:
                event = pb.Event.FromString(data)
            except Exception:
                raise Lost("it sent no event") from None
            kind = event.WhichOneof("kind")
            if kind not in kinds:
                raise Lost(f"it sent an event of the kind {kind}")
            if kind == "failed":
                event = pb.Event(failed=self._checked(event.failed))
            elif kind == "increment" and event.increment.invoke != 0:
                raise Lost("it sent another invoke's increment")
            elif kind == "saves" and event.saves.invoke not in (0, -1):
                raise Lost("it sent another invoke's saves")
            events.append(event)
        return events

    def failure_in(self, data: Any) -> pb.Failure | None:
        """Return a failure from its bytes, None if there is none.

        Raises:
            Lost: it is no failure.
        """
        if data is None:
            return None
        try:
            return self._checked(pb.Failure.FromString(data))
        except Exception:
            raise Lost("it sent no failure") from None

    def _checked(self, failure: pb.Failure) -> pb.Failure:
        """Return a failure as this trace may have it."""
        failure.trace_id, failure.invoke = self.id, 0
        if failure.code not in _CODES or failure.code == pb.ERROR_CODE_UNSPECIFIED:
            failure.code = pb.ERROR_CODE_INTERVENTION
        for name in ("message", "location", "exception_type", "exception_message"):
            setattr(failure, name, clip(getattr(failure, name)))
        return failure

    def failure_of(self, error: Lost) -> pb.Failure:
        """Return the failure of a block whose process is lost."""
        code, message = pb.ERROR_CODE_INTERVENTION, f"the sandboxed process of the block was ended: {error}"
        if error.overdue:
            code = pb.ERROR_CODE_DEADLINE_EXCEEDED
            message = (
                f"the block ran longer than the {self._terms.step_seconds:g} s it may take in one step; end its loop, or do the "
                "work in the notebook after the trace"
            )
        return pb.Failure(code=code, message=clip(message), trace_id=self.id, invoke=0)

    # What the worker asks of a trace.

    def leave(self, names: MutableMapping[str, Any], lends: bool) -> None:
        names.clear()

    def let_go(self) -> None:
        self.end()

    def saved(self, invoke: int, names: Mapping[str, Any], used: float, limits: Limits) -> Sent:
        return self._sent(Kind.SAVES, used)

    def given_back(self, limits: Limits) -> Sent:
        return self._sent(Kind.SHARED, 0.0)

    def _sent(self, kind: Kind, used: float) -> Sent:
        if not self.open:
            return [], []
        try:
            events = self._events(self.ask(kind, {}, used).get("events"), _SENT)
        except Lost as error:
            self.end()
            return [pb.Event(failed=self.failure_of(error))], []
        blobs, self._blobs = self._blobs, []
        return events, blobs

    def stream(self) -> Stream:
        """Return what sends the saves of the trace step by step."""
        return Stream(self)

    def increments(self, steps: int, last: bool, final: bool) -> tuple[list[pb.Event], pb.Failure | None, bool]:
        """Have the process send what is new.

        Returns:
            The last increment if it is `final`, why nothing more is sent, and whether the request goes on.
        """
        if not self.open:
            return [], None, False
        try:
            answer = self.ask(Kind.STREAM, {"steps": steps, "last": last, "final": final}, 0.0)
            events = self._events(answer.get("events"), ("increment",))
            failure = self.failure_in(answer.get("failure"))
        except Lost as error:
            self.end()
            return [], self.failure_of(error), False
        self._put_blobs()
        return events, failure, answer.get("on") is True


class Stream:
    """The increments of a sandboxed trace.

    Args:
        trace: the trace.

    Attributes:
        failure: why nothing more is sent.
    """

    def __init__(self, trace: SandboxedTrace) -> None:
        self.failure: pb.Failure | None = None
        self._trace = trace

    def step(self, namespace: Mapping[str, Any], steps: int, last: bool) -> bool:
        """Send what is new after a step; return False if the request must end."""
        _, self.failure, goes_on = self._trace.increments(steps, last, False)
        return goes_on

    def end(self, namespace: Mapping[str, Any], steps: int) -> pb.Event:
        """Return what is new since the last step, after the request has ended."""
        events, failure, _ = self._trace.increments(steps, True, True)
        self.failure = self.failure or failure
        return events[0] if events else pb.Event(increment=pb.Increment(invoke=0, steps=steps, last=True))
