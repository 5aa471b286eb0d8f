"""Checks keys and counts calls in Serve's gRPC proxy, before a call goes on to the ingress.

gRPC looks up a method's handler as soon as a call's metadata is there. The handlers here take a stream of messages: a server
receives no message of a stream before the handler asks for it. So a call without a known key ends, and its message is never read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import unquote

import grpc

from interpose.contract.errors import FAILURE_METADATA, ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.callers import RETRY_SECONDS, Call, Callers
from serve_app.ingress.pieces import MAX_CALLS, TENANT_CALLS, Pieces
from serve_app.ingress.statuses import STATUS_OF
from serve_app.tenants.keys import KEYLESS_BYTES, key_of

# Keyless messages that are received at a time, and the seconds that each may take. So few long messages are held at a time.
KEYLESS_AT_A_TIME = 16
KEYLESS_SECONDS = 2.0
# Calls of a tenant at a time that send a tokenizer's files: what a client does not read is held here.
TOKENIZER_CALLS = 8

_FETCH = "/interpose.v1.Interpose/Fetch"
_TOKENIZER = "/interpose.v1.Interpose/GetTokenizer"

Handler = Any  # grpc.RpcMethodHandler


class Gate(grpc.GenericRpcHandler):
    """The handlers of one gRPC service, as a server looks them up.

    Args:
        handlers: the service's handlers, by a method's full name. Serve replaces the handlers' functions by its own, which get
            messages unparsed.
        callers: checks and counts the calls.
        keyless: whether the service's methods need no key.
    """

    def __init__(self, handlers: Mapping[str, Handler], callers: Callers, *, keyless: bool = False) -> None:
        # Serve reads and changes the handlers under this name, which is the name in grpc's own class.
        self._method_handlers = {
            name: handler._replace(request_deserializer=None) for name, handler in handlers.items()
        }
        self._callers = callers
        self._keyless = keyless
        self._receiving = asyncio.Semaphore(KEYLESS_AT_A_TIME)
        self._pieces = Pieces()
        self._tokenizers: Counter[str] = Counter()

    def service(self, handler_call_details: Any) -> Handler | None:
        """Return the handler of a call; gRPC calls this before it receives the call's message."""
        method = handler_call_details.method
        handler = self._method_handlers.get(method)
        if handler is None:
            return None
        if self._keyless:
            return self._short(handler)
        return self._checked(method, handler, key_of(handler_call_details.invocation_metadata or ()))

    def _checked(self, method: str, handler: Handler, key: str | None) -> Handler:
        """Return a handler that receives the message of a caller with a known key, and of no other."""

        async def unary(requests: AsyncIterator[bytes], context: Any) -> Any:
            async with _typed(context), self._callers.call(key, _peer_of(context)) as call:
                return await handler.unary_unary(await self._received(requests, call), context)

        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any, None]:
            async with _typed(context), self._callers.call(key, _peer_of(context)) as call:
                message = await self._received(requests, call)
                with self._bounded(method, call.known.tenant.name) as fetch:
                    replies = (fetch(handler.unary_stream) if fetch else handler.unary_stream)(message, context)
                    async with contextlib.aclosing(replies):
                        async for reply in replies:
                            call.waiting = False
                            yield reply
                            call.sent()

        return handler._replace(request_streaming=True, stream_unary=unary, stream_stream=stream)

    async def _received(self, requests: AsyncIterator[bytes], call: Call) -> bytes:
        async with self._callers.receiving(call):
            return await anext(aiter(requests), b"")

    @contextlib.contextmanager
    def _bounded(self, method: str, tenant: str) -> Any:
        """Count a call whose replies are held here until its client reads them.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, there are too many such calls.
        """
        if method == _FETCH:
            held = self._pieces.tenants[tenant]
            if held >= TENANT_CALLS or self._pieces.calls >= MAX_CALLS:
                count, whose = (held, f" for {tenant}") if held >= TENANT_CALLS else (self._pieces.calls, "")
                raise _quota(f"{count} values are being fetched{whose} already")
            with self._pieces.call(tenant):
                yield lambda stream: self._pieces.handler(stream, tenant)
        elif method == _TOKENIZER:
            if self._tokenizers[tenant] >= TOKENIZER_CALLS:
                raise _quota(f"{TOKENIZER_CALLS} calls of {tenant} get a tokenizer already")
            self._tokenizers[tenant] += 1
            try:
                yield None
            finally:
                self._tokenizers[tenant] -= 1
        else:
            yield None

    def _short(self, handler: Handler) -> Handler:
        """Return a handler that receives short messages only, few at a time."""

        async def unary(requests: AsyncIterator[bytes], context: Any) -> Any:
            async with _typed(context):
                return await handler.unary_unary(await self._message(requests, context), context)

        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any, None]:
            async with _typed(context):
                replies = handler.unary_stream(await self._message(requests, context), context)
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        yield reply

        return handler._replace(request_streaming=True, stream_unary=unary, stream_stream=stream)

    async def _message(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._receiving:
            try:
                async with asyncio.timeout(KEYLESS_SECONDS):
                    message = await anext(aiter(requests), b"")
            except TimeoutError:
                raise ServiceFailure(failure(pb.ERROR_CODE_DEADLINE_EXCEEDED, "the message did not come")) from None
        if len(message) > KEYLESS_BYTES:
            text = f"the message has {len(message)} bytes, the limit is {KEYLESS_BYTES}"
            raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, text))
        self._callers.accept(_peer_of(context))
        return message


@contextlib.asynccontextmanager
async def _typed(context: Any) -> AsyncIterator[None]:
    """End a call with the `Failure` that was raised.

    A call that Serve itself has refused gets a `Failure`, too.
    """
    try:
        yield
    except ServiceFailure as error:
        fact = error.failure
        await context.abort(STATUS_OF[fact.code], fact.message, ((FAILURE_METADATA, fact.SerializeToString()),))
    # Serve refuses calls beyond its own bounds by a status alone.
    if context.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and not context.trailing_metadata():
        fact = _quota("the service has as many calls as it takes").failure
        context.set_trailing_metadata(((FAILURE_METADATA, fact.SerializeToString()),))


def _quota(message: str) -> ServiceFailure:
    return ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=RETRY_SECONDS))


def _peer_of(context: Any) -> str:
    return unquote(context.peer())
