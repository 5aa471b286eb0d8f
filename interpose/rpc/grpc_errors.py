"""Failed gRPC calls as errors of `interpose`."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from interpose.contract.errors import (
    FAILURE_METADATA,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    EngineError,
    InterposeError,
    InvalidArgument,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
    from_failure,
)
from interpose.v1.trace_pb2 import Failure

_DETAIL_LIMIT = 500
_TOO_LONG = "message larger than max"

# The errors for a status without a Failure: the call did not reach the service, or the transport refused the call.
_CLASS_OF_STATUS: dict[grpc.StatusCode, type[InterposeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    # The service sends NOT_FOUND with a Failure. Without a Failure, the status is of a proxy that has no application.
    grpc.StatusCode.NOT_FOUND: Unavailable,
    # The ingress sends INTERNAL with a Failure. Without a Failure, the status is of the proxy, and the ingress has died.
    grpc.StatusCode.INTERNAL: ConnectionLost,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QuotaExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: ConnectionLost,
    grpc.StatusCode.UNIMPLEMENTED: VersionMismatch,
}


def from_rpc_error(error: grpc.RpcError, *, address: str = "", trace_id: str = "") -> InterposeError:
    """Return the error that a client raises for a failed call.

    Args:
        error: the error of grpc.
        address: the server's address, for the message.
        trace_id: the id of the trace, if the server's failure has none.
    """
    fact = _failure_in(error)
    if fact is not None:
        if not fact.trace_id:
            fact.trace_id = trace_id
        return from_failure(fact)
    status = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = ((error.details() if isinstance(error, grpc.Call) else "") or "").strip()
    details = details if len(details) <= _DETAIL_LIMIT else details[:_DETAIL_LIMIT] + "…"
    kind = _CLASS_OF_STATUS.get(status, EngineError)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LONG in details:
        # gRPC itself refuses such a message by its first bytes, before any part of the service sees it.
        message = f"a message is longer than the other side takes: send fewer values, and large tensors as uploads ({details})"
        return InvalidArgument(message, status_name=status.name, trace_id=trace_id)
    if status is grpc.StatusCode.NOT_FOUND:
        message = (
            f"a server answers at {address}, but no service runs there (yet); if it is starting, try again ({details})"
        )
    elif kind is ConnectionLost:
        status = grpc.StatusCode.UNAVAILABLE
        message = f"the server at {address} cannot be reached or has gone away: {details}; is `interpose serve` running there?"
    elif kind is VersionMismatch:
        message = f"the server at {address} does not offer this call; upgrade the server ({details})"
    else:
        message = f"{status.name}: {details}" if details else status.name
    return kind(message, status_name=status.name, trace_id=trace_id)


def _failure_in(error: grpc.RpcError) -> Failure | None:
    if not isinstance(error, grpc.Call):
        return None
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_METADATA:
            try:
                return Failure.FromString(value)
            except (DecodeError, TypeError):
                return None
    return None
