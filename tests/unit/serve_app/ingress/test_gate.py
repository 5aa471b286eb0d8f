"""What the gRPC proxy does before a call reaches the ingress, on a server of grpc's own with handlers as Serve puts them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import os
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from interpose.contract.errors import ServiceFailure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app import proxy
from serve_app.ingress import callers as bounds
from serve_app.ingress import gate as gates
from serve_app.ingress.callers import Callers
from serve_app.ingress.connections import connected
from serve_app.ingress.pieces import PIECE_BYTES
from serve_app.key_hashes import hashed
from serve_app.settings import GrpcSettings, Tenant
from serve_app.tenants.book import KeyBook, Keyring, book_of
from tests.e2e.service import failure_of

VALUE = os.urandom(3 * PIECE_BYTES + 5)
KEY = (("x-api-key", "a-key-of-a-tenant"),)


class ServeServer:
    """Registers handlers on a server as Serve's does: its own in the place of all.

    Attributes:
        received: the methods and messages that came through.
        asked: the requests for values.
        forever: the number of `Attach` calls that run, each for ever.
    """

    port: int
    keys: Keyring
    callers: Callers

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.received: list[tuple[str, bytes]] = []
        self.asked: list[service_pb2.FetchRequest] = []
        self.forever = 0

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        [handler] = handlers
        handler._method_handlers = {
            name: one._replace(response_serializer=None, unary_unary=self._unary(name), unary_stream=self._stream(name))
            for name, one in handler._method_handlers.items()
        }
        self._server.add_generic_rpc_handlers(handlers)

    def _unary(self, name: str) -> Any:
        async def unary(data: bytes, context: Any) -> bytes:
            self.received.append((name, data))
            if name.endswith("/Status"):  # as Serve does beyond its bounds
                context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
                context.set_details("too many queued requests")
            return b""

        return unary

    def _stream(self, name: str) -> Any:
        async def stream(data: bytes, context: Any) -> AsyncGenerator[bytes, None]:
            self.received.append((name, data))
            if name.endswith("/Attach"):
                self.forever += 1
                try:
                    yield b"begun"
                    with contextlib.suppress(asyncio.CancelledError):  # as Serve does
                        await asyncio.Event().wait()
                    return
                finally:
                    self.forever -= 1
            if not name.endswith("/Fetch"):
                yield b""
                return
            request = service_pb2.FetchRequest.FromString(data)
            self.asked.append(request)
            stop = request.offset + request.length if request.length else len(VALUE)
            stop = min(stop, request.offset + request.at_most)
            for start in range(request.offset, stop, 1 << 20):
                chunk = service_pb2.FetchChunk(offset=start, data=VALUE[start : min(start + (1 << 20), stop)])
                yield chunk.SerializeToString()

        return stream


def tenant(name: str, *keys: str) -> Tenant:
    return Tenant.model_validate({"name": name, "api_keys": [str(hashed(key)) for key in keys]})


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ServeServer, grpc.aio.Channel]]:
    """A server that knows one key, and a channel to it."""
    keys = Keyring(book_of((tenant("red", "another-key"), tenant("blue", KEY[0][1])), ""))
    callers = Callers(keys, GrpcSettings(calls_per_tenant=16, connections_per_key=2), lambda: connected(port))
    monkeypatch.setattr(proxy, "callers", lambda: callers)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 128 << 20)])
    routed = ServeServer(server)
    servicer = SimpleNamespace(**dict.fromkeys(service_pb2.DESCRIPTOR.services_by_name["Interpose"].methods_by_name))
    proxy.add_interpose(servicer, routed)
    proxy.add_health(SimpleNamespace(Check=None, List=None, Watch=None), routed)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # Without probes a client takes 64 KiB that nobody reads, and not as much as the network seems to bring.
    options = [("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)]
    routed.port, routed.keys, routed.callers = port, keys, callers
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield routed, channel
    await server.stop(None)


@pytest.mark.parametrize("method", ["Hello", "Submit", "Fetch", "Upload"])
@pytest.mark.parametrize(
    ("metadata", "message"), [((), "needs an API key"), ((("authorization", "Bearer wrong"),), "is not known")]
)
async def test_a_call_without_a_known_key_ends_before_its_message_is_read(
    served: Any, method: str, metadata: Any, message: str
) -> None:
    routed, channel = served
    call = channel.unary_stream if method in ("Submit", "Fetch") else channel.unary_unary
    before = psutil.Process().memory_info().rss
    calls = [call(f"/interpose.v1.Interpose/{method}")(bytes(48 << 20), metadata=metadata) for _ in range(2)]
    for one in calls:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            async for _ in one if method in ("Submit", "Fetch") else _once(one):
                pass
        fact = failure_of(caught.value)
        assert isinstance(fact, ServiceFailure) and fact.failure.code == pb.ERROR_CODE_UNAUTHENTICATED
    assert not routed.received
    # Of the messages the client's side of this process holds one copy each.
    assert psutil.Process().memory_info().rss - before < 160 << 20


async def _once(call: Any) -> AsyncIterator[Any]:
    yield await call


@pytest.mark.parametrize("metadata", [KEY, (("authorization", f"Bearer {KEY[0][1]}"),)])
async def test_a_call_with_a_key_goes_on_as_it_is(served: Any, metadata: Any) -> None:
    routed, channel = served
    await channel.unary_unary("/interpose.v1.Interpose/Hello")(b"\xff", metadata=metadata)
    assert routed.received == [("/interpose.v1.Interpose/Hello", b"\xff")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/interpose.v1.Interpose/Nothing")(b"", metadata=metadata)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_before_the_keys_are_known_calls_wait_and_then_are_refused(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed, channel = served
    keys = Keyring()
    monkeypatch.setattr(routed.callers, "_keys", keys)
    hello = channel.unary_unary("/interpose.v1.Interpose/Hello")
    waiting = asyncio.ensure_future(hello(b"a", metadata=KEY))
    await asyncio.sleep(0.1)
    assert not routed.received
    keys.update(routed.keys.book)
    await waiting
    monkeypatch.setattr(routed.callers, "_keys", Keyring())
    monkeypatch.setattr(bounds, "BOOK_SECONDS", 0.05)
    with pytest.raises(grpc.aio.AioRpcError, match="is starting") as caught:
        await hello(b"a", metadata=KEY)
    fact = failure_of(caught.value).failure
    assert fact.code == pb.ERROR_CODE_UNAVAILABLE and fact.retry_after > 0


async def test_a_revoked_key_ends_its_calls_and_no_others(served: Any) -> None:
    routed, channel = served
    attach = channel.unary_stream("/interpose.v1.Interpose/Attach")
    calls = [attach(b"", metadata=metadata) for metadata in (KEY, (("x-api-key", "another-key"),))]
    for call in calls:
        assert await call.read() == b"begun"
    [key] = routed.keys.book.tenants[1].api_keys
    routed.keys.update(routed.keys.book.revoke("blue", key.label))
    with pytest.raises(grpc.aio.AioRpcError, match="was revoked") as caught:
        await calls[0].read()
    assert failure_of(caught.value).failure.code == pb.ERROR_CODE_UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError, match="is not known"):
        await attach(b"", metadata=KEY).read()
    assert routed.forever == 1 and not calls[1].done()
    calls[1].cancel()


async def test_a_key_that_expires_ends_its_calls(served: Any) -> None:
    routed, channel = served
    book: KeyBook = routed.keys.book
    begun = channel.unary_stream("/interpose.v1.Interpose/Attach")(b"", metadata=KEY)
    assert await begun.read() == b"begun"
    [key] = book.tenants[1].api_keys
    past = key.model_copy(update={"expires": datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)})
    blue = book.tenants[1].model_copy(update={"api_keys": (past,)})
    routed.keys.update(dataclasses.replace(book, tenants=(book.tenants[0], blue)))
    with pytest.raises(grpc.aio.AioRpcError, match="has expired"):
        await begun.read()


async def test_calls_of_a_tenant_are_bounded(served: Any) -> None:
    routed, channel = served
    attach = channel.unary_stream("/interpose.v1.Interpose/Attach")
    calls = [attach(b"", metadata=KEY) for _ in range(16)]
    for call in calls:
        await call.read()
    with pytest.raises(grpc.aio.AioRpcError, match=r"16 calls of blue run already.*calls_per_tenant") as caught:
        await attach(b"", metadata=KEY).read()
    fact = failure_of(caught.value).failure
    assert fact.code == pb.ERROR_CODE_QUOTA_EXCEEDED and fact.retry_after > 0
    assert await attach(b"", metadata=(("x-api-key", "another-key"),)).read() == b"begun"
    calls[0].cancel()
    while routed.forever > 16:
        await asyncio.sleep(0.01)
    again = attach(b"", metadata=KEY)
    assert await again.read() == b"begun"


async def test_connections_of_a_key_are_bounded(served: Any) -> None:
    routed, channel = served
    method = "/interpose.v1.Interpose/Hello"
    options = [("grpc.use_local_subchannel_pool", 1)]
    others = [grpc.aio.insecure_channel(f"127.0.0.1:{routed.port}", options=options) for _ in range(2)]
    await channel.unary_unary(method)(b"", metadata=KEY)
    await others[0].unary_unary(method)(b"", metadata=KEY)
    with pytest.raises(grpc.aio.AioRpcError, match=r"2 connections use this key already.*connections_per_key"):
        await others[1].unary_unary(method)(b"", metadata=KEY)
    await others[1].unary_unary(method)(b"", metadata=(("x-api-key", "another-key"),))
    await others[0].close()
    while len(connected(routed.port)) > 2:
        await asyncio.sleep(0.01)
    await others[1].unary_unary(method)(b"", metadata=KEY)
    await others[1].close()


async def test_what_serve_refuses_has_a_type(served: Any) -> None:
    _, channel = served
    with pytest.raises(grpc.aio.AioRpcError, match="too many queued") as caught:
        await channel.unary_unary("/interpose.v1.Interpose/Status")(b"", metadata=KEY)
    fact = failure_of(caught.value).failure
    assert fact.code == pb.ERROR_CODE_QUOTA_EXCEEDED and fact.retry_after > 0


async def test_few_messages_of_a_tenant_are_received_at_a_time(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent calls of one tenant keep its own messages waiting, until they end, and no other tenant's."""
    routed, channel = served
    monkeypatch.setattr(bounds, "RECEIVING_SECONDS", 0.5)
    silent = [channel.stream_unary("/interpose.v1.Interpose/Hello")(metadata=KEY) for _ in range(8)]
    await asyncio.sleep(0.1)
    hello = channel.unary_unary("/interpose.v1.Interpose/Hello")
    waiting = asyncio.ensure_future(hello(b"mine", metadata=KEY))
    await hello(b"theirs", metadata=(("x-api-key", "another-key"),))
    assert [data for _, data in routed.received] == [b"theirs"]
    for call in silent:
        with pytest.raises(grpc.aio.AioRpcError, match="did not come within") as caught:
            await call
        assert failure_of(caught.value).failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    await waiting


async def test_what_needs_no_key_is_short(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    routed, channel = served
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    asking = health_pb2.HealthCheckRequest(service="x").SerializeToString()
    await check(asking)
    assert routed.received == [("/grpc.health.v1.Health/Check", asking)]
    async for _ in channel.unary_stream("/grpc.health.v1.Health/Watch")(asking):
        pass
    with pytest.raises(grpc.aio.AioRpcError, match="the limit is 4096") as caught:
        await check(bytes(5000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and len(routed.received) == 2
    monkeypatch.setattr(gates, "KEYLESS_SECONDS", 0.05)
    silent = channel.stream_unary("/grpc.health.v1.Health/Check")()
    with pytest.raises(grpc.aio.AioRpcError, match="did not come") as caught:
        await silent
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("offset", "length", "at_most"),
    [(0, 0, 0), (7, 0, 0), (7, 2 * PIECE_BYTES, 0), (0, 100, 0), (5, 0, PIECE_BYTES + 1), (0, PIECE_BYTES, 0)],
)
async def test_a_value_arrives_whole_in_pieces(served: Any, offset: int, length: int, at_most: int) -> None:
    routed, channel = served
    request = service_pb2.FetchRequest(session_id="s", blob_id="b", offset=offset, length=length, at_most=at_most)
    found = b""
    async for data in channel.unary_stream("/interpose.v1.Interpose/Fetch")(request.SerializeToString(), metadata=KEY):
        chunk = service_pb2.FetchChunk.FromString(data)
        assert chunk.offset == offset + len(found)
        found += chunk.data
    stop = offset + min(length or len(VALUE), at_most or len(VALUE))
    assert found == VALUE[offset:stop]
    assert all(one.at_most <= PIECE_BYTES and one.blob_id == "b" for one in routed.asked)


async def test_what_nobody_reads_stays_where_it_is(served: Any) -> None:
    """Ten clients that ask for a value and do not read it: each gets a piece, and nothing more leaves the ingress."""
    routed, channel = served
    fetch = channel.unary_stream("/interpose.v1.Interpose/Fetch")
    calls = [fetch(service_pb2.FetchRequest(blob_id="b").SerializeToString(), metadata=KEY) for _ in range(10)]
    while len(routed.asked) < 10:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    assert len(routed.asked) == 10 and sum(one.at_most for one in routed.asked) <= 10 * PIECE_BYTES
    first = calls[0]
    found = b"".join([service_pb2.FetchChunk.FromString(data).data async for data in first])
    assert found == VALUE, "it goes on when it is read"
    for one in calls[1:]:
        one.cancel()


async def test_with_many_fetches_pieces_are_smaller_and_then_they_are_refused(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed, channel = served
    monkeypatch.setattr("serve_app.ingress.pieces.TENANT_BYTES", 4 << 20)
    monkeypatch.setattr(gates, "TENANT_CALLS", 3)
    fetch = channel.unary_stream("/interpose.v1.Interpose/Fetch")
    calls = []
    for number in range(3):
        calls.append(fetch(service_pb2.FetchRequest(blob_id=str(number)).SerializeToString(), metadata=KEY))
        while all(one.blob_id != str(number) for one in routed.asked):
            await asyncio.sleep(0.01)
    first = {one.blob_id: one.at_most >> 20 for one in reversed(routed.asked)}
    assert first == {"0": 4, "1": 2, "2": 1}
    with pytest.raises(grpc.aio.AioRpcError, match="3 values are being fetched for blue already") as caught:
        await fetch(service_pb2.FetchRequest().SerializeToString(), metadata=KEY).read()
    fact = failure_of(caught.value).failure
    assert fact.code == pb.ERROR_CODE_QUOTA_EXCEEDED and fact.retry_after > 0
    others = fetch(service_pb2.FetchRequest().SerializeToString(), metadata=(("x-api-key", "another-key"),))
    assert await others.read(), "another tenant has its own"
    for one in (*calls, others):
        one.cancel()
