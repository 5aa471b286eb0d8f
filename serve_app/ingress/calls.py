"""Makes a Serve call of a gRPC method: bytes in, status and `Failure` out.

Serve takes no servicer: it calls methods of the ingress by name, with the request and a context. The two decorators here
parse the request and authenticate the caller. When the method raises, they put the failure where the client looks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from actors.failures import describe
from actors.telemetry import metrics
from actors.telemetry.spans import HEADER, parent_of
from actors.telemetry.telemetry import Telemetry
from interpose.contract.errors import FAILURE_METADATA, ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.statuses import STATUS_OF
from serve_app.settings import ANONYMOUS, Tenant
from serve_app.tenants.admission import parse
from serve_app.tenants.book import Keyring
from serve_app.tenants.keys import KEYLESS_BYTES, Known, key_of, why_refused

# Trailing metadata beyond 8 KiB may be dropped on the way. Bytes in metadata grow by a third.
_MAX_FAILURE_BYTES = 4096
_MAX_DETAILS = 512

NO_OPERATOR = "this call is for operators: use a key of a tenant with `operator: true` in the service's settings"


@dataclass(frozen=True)
class Caller:
    """What a call's metadata says of its caller.

    Attributes:
        key: the label of the caller's key, "" where none is needed.
        traceparent: the client's span, "" for none.
    """

    key: str = ""
    traceparent: str = ""


_CALLER: ContextVar[Caller] = ContextVar("caller")
_UNKNOWN = Caller()


def caller() -> Caller:
    """Return the caller of the call that runs; a method that yields asks before it yields."""
    return _CALLER.get(_UNKNOWN)


class Serialized:
    """A reply as its bytes, which Serve sends as they are.

    Args:
        data: a serialized message.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        """Return the bytes. Serve calls this method of every reply."""
        return self._data


I = TypeVar("I", bound="Ingress")  # noqa: E741
Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
# Messages, or `Serialized` ones.
Replies = AsyncGenerator[Any, None]


class Ingress(Protocol):
    """What the decorators need of the class whose methods they wrap."""

    keys: Keyring
    max_message_bytes: int
    telemetry: Telemetry


def unary(
    request_type: type[Q], reply_type: type[R], *, keyless: bool = False, operator: bool = False
) -> Callable[[Callable[[I, Q, Tenant], Awaitable[R]]], Callable[..., Awaitable[R]]]:
    """Make `async def method(self, request, tenant) -> reply` a unary call.

    Args:
        keyless: whether a caller needs no API key; the tenant is then the anonymous tenant.
        operator: whether the caller must be an operator.
    """

    def decorate(method: Callable[[I, Q, Tenant], Awaitable[R]]) -> Callable[..., Awaitable[R]]:
        async def call(self: I, data: bytes, grpc_context: RayServegRPCContext) -> R:
            name = ""
            try:
                tenant = _tenant(self, grpc_context, keyless)
                name = tenant.name
                if operator and not tenant.operator:
                    raise ServiceFailure(failure(pb.ERROR_CODE_PERMISSION_DENIED, NO_OPERATOR))
                return await method(self, _received(self, request_type, data, keyless), tenant)
            except Exception as error:
                fact = fail(grpc_context, error)
                if not keyless:
                    _count(self, name, method.__name__, fact)
                return reply_type()

        return _named_like(call, method)

    return decorate


def streaming(
    request_type: type[Q], reply_type: type[R], *, keyless: bool = False
) -> Callable[[Callable[[I, Q, Tenant], Replies]], Callable[..., Replies]]:
    """Make `async def method(self, request, tenant)`, which yields replies, a streaming call.

    A failed call ends with one empty reply: Serve copies the status onto the call with a message, never without one.

    Args:
        keyless: as for `unary`.
    """

    def decorate(method: Callable[[I, Q, Tenant], Replies]) -> Callable[..., Replies]:
        async def call(self: I, data: bytes, grpc_context: RayServegRPCContext) -> Replies:
            name, begun = "", False
            try:
                tenant = _tenant(self, grpc_context, keyless)
                name = tenant.name
                request = _received(self, request_type, data, keyless)
                async with contextlib.aclosing(method(self, request, tenant)) as replies:
                    async for reply in replies:
                        begun = True
                        yield reply
            except Exception as error:
                fact = fail(grpc_context, error)
                if not keyless and not begun:
                    _count(self, name, method.__name__, fact)
                yield reply_type()

        return _named_like(call, method)

    return decorate


def _tenant(ingress: Ingress, context: RayServegRPCContext, keyless: bool) -> Tenant:
    """Return the tenant of a call, before its message is parsed; note its caller.

    Raises:
        ServiceFailure: UNAUTHENTICATED, the key is missing or not known.
    """
    if keyless:
        return ANONYMOUS
    known = authenticate(ingress.keys, context)
    parent = next((value for name, value in context.invocation_metadata() if name == HEADER), "")
    _CALLER.set(Caller(known.key.label if known.key is not None else "", parent_of(parent)))
    return known.tenant


def _received(ingress: Ingress, request_type: type[Q], data: bytes, keyless: bool) -> Q:
    """Return a call's request."""
    return parse(request_type, data, KEYLESS_BYTES if keyless else ingress.max_message_bytes)


def _count(ingress: Ingress, tenant: str, method: str, fact: pb.Failure) -> None:
    """Count a call that was refused."""
    code = pb.ErrorCode.Name(fact.code).removeprefix("ERROR_CODE_")
    quota = getattr(fact, "quota", None)
    ingress.telemetry.counts.add(metrics.REFUSALS, tenant, method, code, quota.name if quota is not None else "")


def authenticate(keys: Keyring, context: RayServegRPCContext) -> Known:
    """Return the caller with a call's API key (`x-api-key`, or `authorization: Bearer …`).

    Raises:
        ServiceFailure: UNAUTHENTICATED, the key is missing, not known, or has expired.
    """
    key = key_of(context.invocation_metadata())
    known = keys.find(key)
    if known is None:
        raise ServiceFailure(failure(pb.ERROR_CODE_UNAUTHENTICATED, why_refused(key)))
    return known


def fail(context: RayServegRPCContext, error: Exception) -> pb.Failure:
    """Set a call's status, text and `Failure` from an exception; return the failure."""
    fact = _trimmed(describe(error))
    context.set_code(STATUS_OF[fact.code])
    context.set_details(_shortened(fact.message, _MAX_DETAILS))
    context.set_trailing_metadata([(FAILURE_METADATA, fact.SerializeToString())])
    return fact


def _trimmed(fact: pb.Failure) -> pb.Failure:
    while fact.ByteSize() > _MAX_FAILURE_BYTES and len(fact.frames) > 1:
        del fact.frames[0]
    if fact.ByteSize() > _MAX_FAILURE_BYTES:
        del fact.frames[:]
        fact.message = _shortened(fact.message, _MAX_FAILURE_BYTES // 4) + "…"
        fact.exception_message = _shortened(fact.exception_message, _MAX_FAILURE_BYTES // 4)
    return fact


def _shortened(text: str, size: int) -> str:
    """Return the beginning of a text, at most `size` bytes long in UTF-8."""
    return text.encode()[:size].decode(errors="ignore")


def _named_like(call: Any, method: Any) -> Any:
    # Not functools.wraps: Serve would then look at the method's own signature and pass no context.
    call.__name__, call.__qualname__, call.__doc__ = method.__name__, method.__qualname__, method.__doc__
    return call
