"""Checks keys and counts calls in Serve's gRPC proxy, before a call goes on to the ingress.

gRPC looks up a method's handler as soon as a call's metadata is there. A call without a known key gets a handler that ends
the call and never reads its message. Where the proxy knows no keys, the ingress checks the key after the message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import grpc

from interpose.contract.errors import FAILURE_METADATA, failure
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.pieces import MAX_CALLS, Pieces
from serve_app.ingress.statuses import STATUS_OF
from serve_app.tenants.keys import KEYLESS_BYTES, KeyTable, key_of, why_refused

# Keyless messages that are received at a time, and the seconds that each may take. So few long messages are held at a time.
KEYLESS_AT_A_TIME = 16
KEYLESS_SECONDS = 2.0

_FETCH = "/interpose.v1.Interpose/Fetch"

Handler = Any  # grpc.RpcMethodHandler


class Gate(grpc.GenericRpcHandler):
    """The handlers of one gRPC service, as a server looks them up.

    Args:
        handlers: the service's handlers, by a method's full name. Serve replaces the handlers' functions by its own, which get
            messages unparsed.
        keys: the known keys; None lets every call pass.
        keyless: whether the service's methods need no key.
    """

    def __init__(self, handlers: Mapping[str, Handler], keys: KeyTable | None, *, keyless: bool = False) -> None:
        # Serve reads and changes the handlers under this name, which is the name in grpc's own class.
        self._method_handlers = {
            name: handler._replace(request_deserializer=None) for name, handler in handlers.items()
        }
        self._keys = keys
        self._keyless = keyless
        self._receiving = asyncio.Semaphore(KEYLESS_AT_A_TIME)
        self._pieces = Pieces()

    def service(self, handler_call_details: Any) -> Handler | None:
        """Return the handler of a call; gRPC calls this before it receives the call's message."""
        method = handler_call_details.method
        handler = self._method_handlers.get(method)
        if handler is None:
            return None
        if self._keyless:
            return self._short(handler)
        key = key_of(handler_call_details.invocation_metadata or ())
        if self._keys is not None and self._keys.find(key) is None:
            return _refusing(handler, pb.ERROR_CODE_UNAUTHENTICATED, why_refused(key))
        if method != _FETCH:
            return handler
        if self._pieces.calls >= MAX_CALLS:
            return _refusing(
                handler, pb.ERROR_CODE_QUOTA_EXCEEDED, f"{MAX_CALLS} values are being fetched already", 1.0
            )
        return handler._replace(unary_stream=self._pieces.handler(handler.unary_stream))

    def _short(self, handler: Handler) -> Handler:
        """Return a handler that receives short messages only, few at a time."""

        async def unary(requests: AsyncIterator[bytes], context: Any) -> Any:
            return await handler.unary_unary(await self._message(requests, context), context)

        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any, None]:
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
                await _end(context, pb.ERROR_CODE_DEADLINE_EXCEEDED, "the message did not come")
        if len(message) > KEYLESS_BYTES:
            text = f"the message has {len(message)} bytes, the limit is {KEYLESS_BYTES}"
            await _end(context, pb.ERROR_CODE_INVALID_ARGUMENT, text)
        return message


def _refusing(handler: Handler, code: pb.ErrorCode, message: str, retry_after: float = 0.0) -> Handler:
    """Return a handler that ends a call without reading its message.

    The handler takes a stream of messages: a server receives no message of a stream before the handler asks for it.
    """

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> None:
        await _end(context, code, message, retry_after)

    return handler._replace(request_streaming=True, stream_unary=refuse, stream_stream=refuse)


async def _end(context: Any, code: pb.ErrorCode, message: str, retry_after: float = 0.0) -> None:
    fact = failure(code, message, retry_after=retry_after)
    await context.abort(STATUS_OF[code], message, ((FAILURE_METADATA, fact.SerializeToString()),))
