"""Turns errors between the parts of the service into a `Failure` that a client can act on.

A client never gets the service's own traceback.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

# The loading time of a replacement engine is not known here. A client that comes back too early gets the same failure again.
RETRY_SECONDS = 5.0
# Room becomes free when sessions end or results expire.
FULL_SECONDS = 30.0

# What Ray raises when a value fits neither into the object store nor onto the disk behind it.
FULL = (ObjectStoreFullError, OutOfDiskError)

_LOST = (RayActorError, DeploymentUnavailableError, ObjectLostError, TimeoutError)


def describe(error: BaseException, trace_id: str = "") -> pb.Failure:
    """Turn any exception into the failure that the client gets.

    A lost actor or engine is UNAVAILABLE and retryable. A full queue is QUOTA_EXCEEDED. A cancellation is CANCELLED. An error
    that should not happen is logged here under an id, and the client gets the id.
    """
    cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error
    if isinstance(cause, ServiceFailure):
        found = pb.Failure()
        found.CopyFrom(cause.failure)
        if not found.trace_id:
            found.trace_id = trace_id
        return found
    fields = {"trace_id": trace_id, "invoke": -1}
    if isinstance(cause, BackPressureError):
        return failure(
            pb.ERROR_CODE_QUOTA_EXCEEDED,
            "the engine's queue is full: too many traces are waiting already; try again in a moment",
            retry_after=1.0,
            **fields,
        )
    if isinstance(cause, RequestCancelledError | asyncio.CancelledError):
        return failure(pb.ERROR_CODE_CANCELLED, "the trace was cancelled", **fields)
    if isinstance(cause, FULL):
        return full(trace_id)
    if isinstance(cause, _LOST):
        logger.warning("trace %s lost: %s", trace_id or "-", type(cause).__name__)
        return unavailable("the engine or session that worked on it is gone and is replaced by itself", trace_id)
    incident = uuid.uuid4().hex[:12]
    logger.error("internal error %s (trace %s)", incident, trace_id or "-", exc_info=error)
    return failure(
        pb.ERROR_CODE_ENGINE,
        f"the service failed in a way that is not the block's fault; its log has the details under {incident}",
        **fields,
    )


def unavailable(message: str, trace_id: str = "", retry_after: float = RETRY_SECONDS) -> pb.Failure:
    """Return the failure of a part that the service replaces by itself."""
    return failure(
        pb.ERROR_CODE_UNAVAILABLE,
        f"{message}; try again in a while",
        trace_id=trace_id,
        invoke=-1,
        retry_after=retry_after,
    )


def full(trace_id: str = "") -> pb.Failure:
    """Return the failure of a saved value for which there is no room now."""
    return failure(
        pb.ERROR_CODE_QUOTA_EXCEEDED,
        "the service has no room left for saved values, neither in memory nor on disk: save less, close sessions, forget jobs, "
        "or try again when others have",
        trace_id=trace_id,
        invoke=-1,
        retry_after=FULL_SECONDS,
    )


def not_found(what: str) -> ServiceFailure:
    """Return the failure of a name that does not exist, or no longer exists."""
    return ServiceFailure(failure(pb.ERROR_CODE_NOT_FOUND, what))
