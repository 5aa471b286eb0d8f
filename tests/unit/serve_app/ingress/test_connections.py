"""Bounds of connections, on a server of grpc's own with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve_app.ingress import connections
from serve_app.ingress.connections import Connections, address_of, connected
from serve_app.ingress.listening import options_of
from serve_app.settings import GrpcSettings

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextlib.asynccontextmanager
async def serving(settings: GrpcSettings) -> AsyncIterator[int]:
    server = grpc.aio.server(options=options_of(settings))

    async def echo(data: bytes, context: Any) -> bytes:
        return data

    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"b": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


def opened(port: int, count: int, data: bytes = b"") -> list[socket.socket]:
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for one in made:
        one.sendall(data)
        one.setblocking(False)
    return made


def is_open(one: socket.socket) -> bool:
    try:
        while data := one.recv(65536):
            del data
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def until_open(sockets: list[socket.socket], count: int) -> None:
    async with asyncio.timeout(20):
        while sum(map(is_open, sockets)) != count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("settings", "data"),
    [(GrpcSettings(handshake_seconds=0.2), b""), (GrpcSettings(handshake_seconds=60, idle_seconds=0.2), PREFACE)],
)
async def test_what_does_not_begin_and_what_idles_is_closed(settings: GrpcSettings, data: bytes) -> None:
    async with serving(settings) as port:
        sockets = opened(port, 5, data)
        await until_open(sockets, 0)


async def test_connections_are_bounded() -> None:
    async with serving(GrpcSettings(max_connections=5)) as port:
        sockets = opened(port, 12)
        await until_open(sockets, 5)


async def test_connections_of_one_address_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection with an accepted call stays, whatever came before."""
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.02)
    settings = GrpcSettings(connections_per_peer=3)
    accepted: set[str] = set()
    async with serving(settings) as port:
        watched = Connections(port, settings, lambda: accepted)
        sockets = opened(port, 6, PREFACE)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            before = watched.now()
            assert await channel.unary_unary("/a/b")(b"x") == b"x"
            accepted.update(watched.now() - before)
            assert len(accepted) == 1
            task = asyncio.create_task(watched.watch(lambda peers: None))
            await until_open(sockets, 2)
            assert await channel.unary_unary("/a/b")(b"y") == b"y" and accepted <= watched.now()
            task.cancel()


def test_which_connections_are_closed() -> None:
    settings = GrpcSettings(connections_per_peer=2, keyless_seconds=10)
    accepted = {"ipv4:1.1.1.1:4", "ipv4:1.1.1.1:1"}
    watched = Connections(1, settings, lambda: accepted)
    one, other = [f"ipv4:1.1.1.1:{port}" for port in range(1, 5)], "ipv6:[::1]:9"
    assert watched.look(frozenset(one[:1]), 0.0) == set()
    assert watched.look(frozenset([*one[:3], other]), 1.0) in ({one[1]}, {one[2]})
    assert watched.look(frozenset([one[0], one[2], one[3], other]), 2.0) == {one[2]}, "without an accepted call"
    assert watched.look(frozenset([one[0], one[3], other]), 12.0) == {other}, "no accepted call for long"
    assert Connections(1, GrpcSettings(connections_per_peer=0), lambda: accepted).look(frozenset(one), 0.0) == set()


def test_the_kernels_table_is_read(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:2328 00000000:0000 0A 0\n"
        "   1: 0100007F:2328 0200007F:1F90 01 0\n"
        "   2: 0000000000000000FFFF00000100007F:2328 0000000000000000FFFF00000300007F:1F91 01 0\n"
        "   3: 00000000000000000000000001000000:2328 00000000000000000000000001000000:1F92 01 0\n"
        "   4: 0100007F:2329 0400007F:1F90 01 0\n"
    )
    found = connected(9000, [table, tmp_path / "nowhere"])
    assert found == {"ipv4:127.0.0.2:8080", "ipv4:127.0.0.3:8081", "ipv6:[::1]:8082"}
    assert {address_of(peer) for peer in found} == {"ipv4:127.0.0.2", "ipv4:127.0.0.3", "ipv6:[::1]"}
