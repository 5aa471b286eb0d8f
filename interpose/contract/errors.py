"""Errors as facts with fields: the classes a notebook catches, and how they travel as `Failure` messages.

One table maps the protocol's codes to names of gRPC statuses, one to classes. A server raises `ServiceFailure`; a client
turns a `Failure` into one of the classes with `from_failure`. Importing this module does not import grpc, because engine
workers import it: `interpose.rpc.grpc_errors` and `serve_app.statuses` map names to gRPC's own statuses.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from interpose.v1 import trace_pb2
from interpose.v1.trace_pb2 import Failure, Frame

if TYPE_CHECKING:
    import grpc

# The trailing metadata of a failed call that holds its `Failure`.
FAILURE_METADATA = "interpose-failure-bin"

# The gRPC status of a call that fails with a code, by its name in `grpc.StatusCode`.
STATUS_NAMES: dict[int, str] = {
    trace_pb2.ERROR_CODE_UNSPECIFIED: "UNKNOWN",
    trace_pb2.ERROR_CODE_INTERVENTION: "INVALID_ARGUMENT",
    trace_pb2.ERROR_CODE_UNKNOWN_LOCATION: "NOT_FOUND",
    trace_pb2.ERROR_CODE_OUT_OF_ORDER: "FAILED_PRECONDITION",
    trace_pb2.ERROR_CODE_INVALID_ARGUMENT: "INVALID_ARGUMENT",
    trace_pb2.ERROR_CODE_UNAUTHENTICATED: "UNAUTHENTICATED",
    trace_pb2.ERROR_CODE_PERMISSION_DENIED: "PERMISSION_DENIED",
    trace_pb2.ERROR_CODE_QUOTA_EXCEEDED: "RESOURCE_EXHAUSTED",
    trace_pb2.ERROR_CODE_CANCELLED: "CANCELLED",
    trace_pb2.ERROR_CODE_DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    trace_pb2.ERROR_CODE_UNAVAILABLE: "UNAVAILABLE",
    trace_pb2.ERROR_CODE_ENGINE: "INTERNAL",
    trace_pb2.ERROR_CODE_NOT_FOUND: "NOT_FOUND",
    trace_pb2.ERROR_CODE_VERSION: "FAILED_PRECONDITION",
}


# Where nothing better is known: an engine or a connection is back after some seconds, room after less.
RETRY_SECONDS = {trace_pb2.ERROR_CODE_UNAVAILABLE: 5.0, trace_pb2.ERROR_CODE_QUOTA_EXCEEDED: 1.0}


class InterposeError(Exception):
    """Base of every error of a trace.

    Attributes:
        message: what happened, why, and what to write instead.
        status: the gRPC status, a `grpc.StatusCode`.
        status_name: its name, e.g. "UNAVAILABLE".
        trace_id: the trace, or "".
        invoke: index of the invoke, or -1 for the whole trace.
        location: the location it is about, e.g. "model.layers.2.output", or "".
        suggestions: near misses.
        retry_after: seconds after which another try makes sense; more than 0 for every `Unavailable` and `QuotaExceeded`. Of a
            limit on one trace alone the message says what to change before that.
        remote_traceback: the user's own lines, as Python prints a traceback; "" if none are known.
        frames: the same as facts.
    """

    code = trace_pb2.ERROR_CODE_UNSPECIFIED

    def __init__(
        self,
        message: str,
        *,
        status_name: str = "",
        trace_id: str = "",
        invoke: int = -1,
        location: str = "",
        suggestions: Sequence[str] = (),
        retry_after: float = 0.0,
        frames: Iterable[Frame] = (),
    ) -> None:
        self.message = message
        self.status_name = status_name or STATUS_NAMES[self.code]
        self.trace_id = trace_id
        self.invoke = invoke
        self.location = location
        self.suggestions = tuple(suggestions)
        self.retry_after = retry_after or RETRY_SECONDS.get(self.code, 0.0)
        self.frames = tuple(frames)
        self._lines = format_frames(self.frames)
        super().__init__(f"{message}\n\n{self._lines}" if self._lines else message)

    @property
    def status(self) -> grpc.StatusCode:
        # Imported here and nowhere else in this module, so that engine workers, which raise these errors, load no grpc.
        import grpc

        return grpc.StatusCode[self.status_name]

    @property
    def remote_traceback(self) -> str:
        if not self._lines:
            return ""
        return f"Traceback of the block (most recent call last):\n{self._lines}\n{self.message}"

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> Any:
        fields = {name: getattr(self, name) for name in _FIELDS}
        return _rebuild, (type(self), self.message, fields, [frame.SerializeToString() for frame in self.frames])


_FIELDS = ("status_name", "trace_id", "invoke", "location", "suggestions", "retry_after")


def _rebuild(kind: type[InterposeError], message: str, fields: dict[str, Any], frames: list[bytes]) -> InterposeError:
    return kind(message, frames=[Frame.FromString(frame) for frame in frames], **fields)


class InterposeWarning(UserWarning):
    """Something that works, and hardly as it was meant."""


class InterventionError(InterposeError):
    """The user's own code raised; the message is the exception as Python prints it, e.g. `ValueError: boom`."""

    code = trace_pb2.ERROR_CODE_INTERVENTION


class UnknownLocation(InterposeError, AttributeError):
    """There is no such module, or the forward pass never came to the location."""

    code = trace_pb2.ERROR_CODE_UNKNOWN_LOCATION


class OutOfOrder(InterposeError):
    """A location was asked for after the forward pass had left it."""

    code = trace_pb2.ERROR_CODE_OUT_OF_ORDER


class InvalidArgument(InterposeError):
    """A prompt, a sampling parameter, a block or a value that is not taken."""

    code = trace_pb2.ERROR_CODE_INVALID_ARGUMENT


class NotFound(InvalidArgument):
    """A model, session, trace or saved value that the server does not know, or not any more."""

    code = trace_pb2.ERROR_CODE_NOT_FOUND


class Unauthenticated(InterposeError):
    """The API key is missing or not known."""

    code = trace_pb2.ERROR_CODE_UNAUTHENTICATED


class PermissionDenied(InterposeError):
    """The tenant may not do this."""

    code = trace_pb2.ERROR_CODE_PERMISSION_DENIED


class QuotaExceeded(InterposeError):
    """More than the tenant may use now; `retry_after` says when to come back."""

    code = trace_pb2.ERROR_CODE_QUOTA_EXCEEDED


class Cancelled(InterposeError):
    """The trace was cancelled."""

    code = trace_pb2.ERROR_CODE_CANCELLED


class DeadlineExceeded(InterposeError):
    """The block, or the whole call, took longer than it may."""

    code = trace_pb2.ERROR_CODE_DEADLINE_EXCEEDED


class Unavailable(InterposeError):
    """The server or a part of it is gone; the same trace can be tried again."""

    code = trace_pb2.ERROR_CODE_UNAVAILABLE


class ConnectionLost(Unavailable):
    """The way to the server broke, or a part of the server on it died; what was asked for may go on behind it."""


class EngineError(InterposeError):
    """The engine failed for a reason that is not the block's."""

    code = trace_pb2.ERROR_CODE_ENGINE


class VersionMismatch(InterposeError):
    """Client and server speak no common protocol; the message says which to upgrade."""

    code = trace_pb2.ERROR_CODE_VERSION


_CLASSES: tuple[type[InterposeError], ...] = (
    InterventionError, UnknownLocation, OutOfOrder, InvalidArgument, NotFound, Unauthenticated, PermissionDenied,
    QuotaExceeded, Cancelled, DeadlineExceeded, Unavailable, EngineError, VersionMismatch,
)  # fmt: skip
CLASS_OF: dict[int, type[InterposeError]] = {kind.code: kind for kind in _CLASSES}


class ServiceFailure(Exception):
    """What a part of the service raises: a `Failure` for the client, never with a traceback of ours."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> Any:
        return _rebuild_service_failure, (self.failure.SerializeToString(),)


def _rebuild_service_failure(data: bytes) -> ServiceFailure:
    return ServiceFailure(Failure.FromString(data))


def failure(code: int, message: str, **fields: Any) -> Failure:
    """Return a Failure; without `invoke` among the fields it is about the whole trace."""
    return with_retry(Failure(code=code, message=message, **{"invoke": -1, **fields}))  # type: ignore[arg-type]


def with_retry(fact: Failure) -> Failure:
    """Return the same failure; one that another try may mend says when to try, if only roughly."""
    if fact.retry_after <= 0 and fact.code in RETRY_SECONDS:
        fact.retry_after = RETRY_SECONDS[fact.code]
    return fact


def from_failure(fact: Failure) -> InterposeError:
    """Return the error that a notebook gets for a failure."""
    kind = CLASS_OF.get(fact.code, EngineError)
    message = fact.message or "the server gave no reason"
    if fact.suggestions and not any(name in message for name in fact.suggestions):
        message += f"; {did_you_mean(fact.suggestions)}"
    return kind(
        message,
        trace_id=fact.trace_id,
        invoke=fact.invoke,
        location=fact.location,
        suggestions=fact.suggestions,
        retry_after=fact.retry_after,
        frames=fact.frames,
    )


def did_you_mean(names: Sequence[str]) -> str:
    """Return "did you mean a, b or c?"."""
    if not names:
        return ""
    head, last = ", ".join(names[:-1]), names[-1]
    return f"did you mean {head} or {last}?" if head else f"did you mean {last}?"


def format_frames(frames: Iterable[Frame]) -> str:
    """Return the user's lines as Python prints them in a traceback, with a caret under what was running."""
    lines = []
    for frame in frames:
        lines.append(
            f'  File "{frame.filename}", line {frame.line}' + (f", in {frame.function}" if frame.function else "")
        )
        text = frame.text.rstrip()
        if not text:
            continue
        lines.append(f"    {text.strip()}")
        caret = _caret(frame, text)
        if caret:
            lines.append(f"    {caret}")
    return "\n".join(lines)


def _caret(frame: Frame, text: str) -> str:
    """Return the marks under the part of the line that was running, or "" if that would mark all of it or is unknown.

    Columns count in the original file. A block's text travels without its indentation, so that is looked up there.
    """
    original = linecache.getline(frame.filename, frame.line).rstrip()
    if original.strip() != text.strip():
        original = text
    start = frame.column - (len(original) - len(original.lstrip()))
    stripped = original.strip()
    end = len(stripped) if frame.end_line > frame.line else start + frame.end_column - frame.column
    if not 0 <= start < end <= len(stripped) or (start, end) == (0, len(stripped)):
        return ""
    return " " * start + "^" * (end - start)
