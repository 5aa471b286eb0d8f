"""The error classes that a notebook catches, and their form as `Failure` messages.

`STATUS_NAMES` maps the protocol's codes to names of gRPC statuses, `CLASS_OF` maps them to classes. A server raises
`ServiceFailure`. A client turns a `Failure` into an error with `from_failure`. This module does not import grpc, because
engine workers import this module. `interpose.rpc.grpc_errors` and `serve_app.ingress.statuses` map the names to gRPC's own
statuses.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from interpose.contract.idioms import OF_VALUES
from interpose.contract.tracebacks import cut
from interpose.v1 import trace_pb2
from interpose.v1.trace_pb2 import Failure, Frame

if TYPE_CHECKING:
    import grpc

# The key of the `Failure` in the trailing metadata of a failed call.
FAILURE_METADATA = "interpose-failure-bin"

# For each code, the gRPC status of the failed call: its name in `grpc.StatusCode`.
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


# Seconds to wait where the server names no time. An engine or a connection needs some seconds to come back.
RETRY_SECONDS = {trace_pb2.ERROR_CODE_UNAVAILABLE: 5.0, trace_pb2.ERROR_CODE_QUOTA_EXCEEDED: 1.0}


class InterposeError(Exception):
    """Base class of the errors of a trace.

    Attributes:
        message: the event, its reason, and the code to write instead.
        status: the gRPC status, a `grpc.StatusCode`.
        status_name: the name of the status, e.g. "UNAVAILABLE".
        trace_id: the id of the trace, or "".
        invoke: index of the invoke, or -1 for the whole trace.
        location: the location of the error, e.g. "model.layers.2.output", or "".
        suggestions: names that are similar to an unknown name.
        retry_after: seconds to wait before another try; more than 0 for every `Unavailable` and `QuotaExceeded`. If a single
            trace is over a limit, the message says what to change before the next try.
        remote_traceback: the user's own lines in the form of a Python traceback, or "" if they are unknown.
        frames: the frames of that traceback, as messages.
        page: the section of the documents with the causes and remedies of this class.
    """

    code = trace_pb2.ERROR_CODE_UNSPECIFIED
    shown_short = True  # a traceback ends at the user's own line
    _fields: tuple[str, ...] = ("status_name", "trace_id", "invoke", "location", "suggestions", "retry_after")

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
        # Python 3.11 and later, IPython and pytest print it below the message.
        self.__notes__ = [f"Remedies: {self.page}"]

    @property
    def page(self) -> str:
        return f"docs/errors.md#{type(self).__name__.lower()}"

    @property
    def status(self) -> grpc.StatusCode:
        # The import is here because engine workers raise these errors and must not load grpc.
        import grpc

        return grpc.StatusCode[self.status_name]

    @property
    def remote_traceback(self) -> str:
        if not self._lines:
            return ""
        return f"Traceback of the block (most recent call last):\n{self._lines}\n{self.message}"

    def __str__(self) -> str:
        return str(self.args[0])

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows for this error."""
        from IPython.core.getipython import get_ipython

        shown: list[str] = get_ipython().InteractiveTB.structured_traceback(type(self), cut(self), self.__traceback__)
        return shown

    def __reduce__(self) -> Any:
        fields = {name: getattr(self, name) for name in self._fields}
        return _rebuild, (type(self), self.message, fields, [frame.SerializeToString() for frame in self.frames])


def _rebuild(kind: type[InterposeError], message: str, fields: dict[str, Any], frames: list[bytes]) -> InterposeError:
    return kind(message, frames=[Frame.FromString(frame) for frame in frames], **fields)


class InterposeWarning(UserWarning):
    """Warning about code that runs, but probably does not do what the user meant."""


class UnsavedWarning(InterposeWarning):
    """Warning about a name that a block assigned and did not save.

    The notebook has no such name.
    """


class InterventionError(InterposeError):
    """The user's code raised; the message is the exception's last line, e.g. `ValueError: boom`."""

    code = trace_pb2.ERROR_CODE_INTERVENTION


class UnknownLocation(InterposeError, AttributeError):
    """There is no such module, or the forward pass did not reach the location."""

    code = trace_pb2.ERROR_CODE_UNKNOWN_LOCATION


class OutOfOrder(InterposeError):
    """The block asked for a location after the forward pass had left it."""

    code = trace_pb2.ERROR_CODE_OUT_OF_ORDER


class InvalidArgument(InterposeError):
    """A prompt, a sampling parameter, a block or a value is not accepted."""

    code = trace_pb2.ERROR_CODE_INVALID_ARGUMENT


class NotFound(InvalidArgument):
    """The server does not know a model, session, trace or saved value, or has dropped it."""

    code = trace_pb2.ERROR_CODE_NOT_FOUND


class Unauthenticated(InterposeError):
    """The API key is missing or unknown."""

    code = trace_pb2.ERROR_CODE_UNAUTHENTICATED


class PermissionDenied(InterposeError):
    """The tenant may not do this."""

    code = trace_pb2.ERROR_CODE_PERMISSION_DENIED


class QuotaExceeded(InterposeError):
    """The tenant is over a limit; `retry_after` says when to try again.

    Attributes:
        quota: the quota that is reached, e.g. "tokens_per_minute", or "" where another limit is reached.
        limit: the quota's limit.
        used: how much of it was used.
    """

    code = trace_pb2.ERROR_CODE_QUOTA_EXCEEDED

    def __init__(self, message: str, *, quota: str = "", limit: float = 0.0, used: float = 0.0, **fields: Any) -> None:
        self.quota = quota
        self.limit = limit
        self.used = used
        super().__init__(message, **fields)

    _fields = (*InterposeError._fields, "quota", "limit", "used")


class Cancelled(InterposeError):
    """The trace was cancelled."""

    code = trace_pb2.ERROR_CODE_CANCELLED


class DeadlineExceeded(InterposeError):
    """The block, or the whole call, took longer than its time limit."""

    code = trace_pb2.ERROR_CODE_DEADLINE_EXCEEDED


class Unavailable(InterposeError):
    """The server or a part of the server is gone; the client may try the same trace again."""

    code = trace_pb2.ERROR_CODE_UNAVAILABLE


class ConnectionLost(Unavailable):
    """The connection broke, or a process between client and engine died.

    The trace may go on in the engine.
    """


class EngineError(InterposeError):
    """The engine failed, and the block is not the reason."""

    code = trace_pb2.ERROR_CODE_ENGINE


class VersionMismatch(InterposeError):
    """Client and server speak no common protocol; the message says which side to upgrade."""

    code = trace_pb2.ERROR_CODE_VERSION


_CLASSES: tuple[type[InterposeError], ...] = (
    InterventionError, UnknownLocation, OutOfOrder, InvalidArgument, NotFound, Unauthenticated, PermissionDenied,
    QuotaExceeded, Cancelled, DeadlineExceeded, Unavailable, EngineError, VersionMismatch,
)  # fmt: skip
# The message of a block that asks a tensor for what another tool's values have.
_MISSING = re.compile(r"AttributeError: 'Tensor' object has no attribute '(\w+)'")
CLASS_OF: dict[int, type[InterposeError]] = {kind.code: kind for kind in _CLASSES}


class ServiceFailure(Exception):
    """The exception of a part of the service: a `Failure` for the client.

    It never holds a traceback of the service's own code.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> Any:
        return _rebuild_service_failure, (self.failure.SerializeToString(),)


def _rebuild_service_failure(data: bytes) -> ServiceFailure:
    return ServiceFailure(Failure.FromString(data))


def failure(code: int, message: str, **fields: Any) -> Failure:
    """Return a Failure; without the field `invoke`, the whole trace failed."""
    return with_retry(Failure(code=code, message=message, **{"invoke": -1, **fields}))  # type: ignore[arg-type]


def with_retry(fact: Failure) -> Failure:
    """Return the failure with a `retry_after`, where another try may succeed."""
    if fact.retry_after <= 0 and fact.code in RETRY_SECONDS:
        fact.retry_after = RETRY_SECONDS[fact.code]
    return fact


def from_failure(fact: Failure) -> InterposeError:
    """Return the error that a client raises for a failure."""
    kind = CLASS_OF.get(fact.code, EngineError)
    message = fact.message or "the server gave no reason"
    missing = _MISSING.search(message)
    if missing is not None and missing[1] in OF_VALUES:
        message += f"; {OF_VALUES[missing[1]]}"
    if fact.suggestions and not any(name in message for name in fact.suggestions):
        message += f"; {did_you_mean(fact.suggestions)}"
    more: dict[str, Any] = {}
    if kind is QuotaExceeded:
        more = {"quota": fact.quota.name, "limit": fact.quota.limit, "used": fact.quota.used}
    return kind(
        message,
        **more,
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
    """Return frames as the lines of a Python traceback, with carets under the running code."""
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
    """Return the carets under the running part of a line.

    The text is "" if the part is unknown, or is the whole line. Columns count in the original file. A block's text travels
    without its indentation, so the indentation is read from the file.
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
