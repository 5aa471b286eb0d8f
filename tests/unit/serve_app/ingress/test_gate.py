"""What the gRPC proxy does before a call reaches the ingress, on a server of grpc's own with handlers as Serve puts them."""

from __future__ import annotations

import asyncio
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
from serve_app.environment import HASHES_VARIABLE
from serve_app.ingress import gate as gates
from serve_app.ingress.pieces import PIECE_BYTES
from serve_app.key_hashes import hashed
from tests.e2e.service import failure_of

VALUE = os.urandom(3 * PIECE_BYTES + 5)
KEY = (("x-api-key", "a-key-of-a-tenant"),)


class ServeServer:
    """Registers handlers on a server as Serve's does: its own in the place of all.

    Attributes:
        received: the methods and messages that came through.
        sent: bytes of values that left.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.received: list[tuple[str, bytes]] = []
        self.asked: list[service_pb2.FetchRequest] = []

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
            return b""

        return unary

    def _stream(self, name: str) -> Any:
        async def stream(data: bytes, context: Any) -> AsyncGenerator[bytes, None]:
            self.received.append((name, data))
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


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ServeServer, grpc.aio.Channel]]:
    """A server that knows one key, and a channel to it."""
    monkeypatch.setenv(HASHES_VARIABLE, "\n".join(f"- {hashed(key)}" for key in ("another-key", KEY[0][1])))
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 128 << 20)])
    routed = ServeServer(server)
    servicer = SimpleNamespace(**dict.fromkeys(service_pb2.DESCRIPTOR.services_by_name["Interpose"].methods_by_name))
    proxy.add_interpose(servicer, routed)
    proxy.add_health(SimpleNamespace(Check=None, List=None, Watch=None), routed)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # Without probes a client takes 64 KiB that nobody reads, and not as much as the network seems to bring.
    options = [("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)]
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


async def test_without_hashes_the_ingress_looks_at_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Serve's own tools start the proxies."""
    monkeypatch.delenv(HASHES_VARIABLE, raising=False)
    taken: list[Any] = []
    server = SimpleNamespace(add_generic_rpc_handlers=taken.extend)
    servicer = SimpleNamespace(**dict.fromkeys(service_pb2.DESCRIPTOR.services_by_name["Interpose"].methods_by_name))
    proxy.add_interpose(servicer, server)
    details = SimpleNamespace(method="/interpose.v1.Interpose/Submit", invocation_metadata=())
    assert not taken[0].service(details).request_streaming


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
    monkeypatch.setattr("serve_app.ingress.pieces.ALL_BYTES", 4 << 20)
    monkeypatch.setattr(gates, "MAX_CALLS", 3)
    fetch = channel.unary_stream("/interpose.v1.Interpose/Fetch")
    calls = []
    for number in range(3):
        calls.append(fetch(service_pb2.FetchRequest(blob_id=str(number)).SerializeToString(), metadata=KEY))
        while all(one.blob_id != str(number) for one in routed.asked):
            await asyncio.sleep(0.01)
    first = {one.blob_id: one.at_most >> 20 for one in reversed(routed.asked)}
    assert first == {"0": 4, "1": 2, "2": 1}
    with pytest.raises(grpc.aio.AioRpcError, match="being fetched already") as caught:
        await fetch(service_pb2.FetchRequest().SerializeToString(), metadata=KEY).read()
    fact = failure_of(caught.value).failure
    assert fact.code == pb.ERROR_CODE_QUOTA_EXCEEDED and fact.retry_after > 0
    for one in calls:
        one.cancel()
