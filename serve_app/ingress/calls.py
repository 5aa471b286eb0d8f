"""Makes a Serve call of a gRPC method: bytes in, status and `Failure` out.

Serve takes no servicer: it calls methods of the ingress by name, with the request and a context. The two decorators here
parse the request and authenticate the caller. When the method raises, they put the failure where the client looks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from actors.failures import describe
from interpose.contract.errors import FAILURE_METADATA, ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.statuses import STATUS_OF
from serve_app.settings import ANONYMOUS, Tenant
from serve_app.tenants.admission import parse
from serve_app.tenants.book import Keyring
from serve_app.tenants.keys import KEYLESS_BYTES, key_of, why_refused

# Trailing metadata beyond 8 KiB may be dropped on the way. Bytes in metadata grow by a third.
_MAX_FAILURE_BYTES = 4096
_MAX_DETAILS = 512


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


def unary(
    request_type: type[Q], reply_type: type[R], *, keyless: bool = False
) -> Callable[[Callable[[I, Q, Tenant], Awaitable[R]]], Callable[..., Awaitable[R]]]:
    """Make `async def method(self, request, tenant) -> reply` a unary call.

    Args:
        keyless: whether a caller needs no API key; the tenant is then the anonymous tenant.
    """

    def decorate(method: Callable[[I, Q, Tenant], Awaitable[R]]) -> Callable[..., Awaitable[R]]:
        async def call(self: I, data: bytes, grpc_context: RayServegRPCContext) -> R:
            try:
                return await method(self, *_received(self, request_type, data, grpc_context, keyless))
            except Exception as error:
                fail(grpc_context, error)
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
            try:
                request, tenant = _received(self, request_type, data, grpc_context, keyless)
                async with contextlib.aclosing(method(self, request, tenant)) as replies:
                    async for reply in replies:
                        yield reply
            except Exception as error:
                fail(grpc_context, error)
                yield reply_type()

        return _named_like(call, method)

    return decorate


def _received(
    ingress: Ingress, request_type: type[Q], data: bytes, context: RayServegRPCContext, keyless: bool
) -> tuple[Q, Tenant]:
    """Return a call's request and its tenant.

    Where a key is needed, the message of a caller without a key is not parsed.
    """
    tenant = ANONYMOUS if keyless else authenticate(ingress.keys, context)
    return parse(request_type, data, KEYLESS_BYTES if keyless else ingress.max_message_bytes), tenant


def authenticate(keys: Keyring, context: RayServegRPCContext) -> Tenant:
    """Return the tenant of a call's API key (`x-api-key`, or `authorization: Bearer …`).

    Raises:
        ServiceFailure: UNAUTHENTICATED, the key is missing, not known, or has expired.
    """
    key = key_of(context.invocation_metadata())
    known = keys.find(key)
    if known is None:
        raise ServiceFailure(failure(pb.ERROR_CODE_UNAUTHENTICATED, why_refused(key)))
    return known.tenant


def fail(context: RayServegRPCContext, error: Exception) -> None:
    """Set a call's status, text and `Failure` from an exception."""
    fact = _trimmed(describe(error))
    context.set_code(STATUS_OF[fact.code])
    context.set_details(_shortened(fact.message, _MAX_DETAILS))
    context.set_trailing_metadata([(FAILURE_METADATA, fact.SerializeToString())])


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
