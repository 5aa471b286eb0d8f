"""Watches the connections of this process's gRPC server, and closes those beyond the bounds.

gRPC closes connections that do not begin or that idle, and bounds their number. It counts no connections of one address, and
takes a connection for good on which nothing but HTTP/2 has begun. The kernel's table of connections says which there are. To
close a connection, its socket in this process is shut down: gRPC then sees that the other end has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from serve_app.settings import GrpcSettings

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


def connected(port: int, tables: Iterable[Path] = _TABLES) -> frozenset[str]:
    """Return the peers that are connected to a port, as gRPC names them: `ipv4:1.2.3.4:567`."""
    found = set()
    for table in tables:
        with contextlib.suppress(OSError), table.open() as lines:
            next(lines, "")
            for line in lines:
                _, local, remote, state, *_ = line.split()
                if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                    found.add(_named(remote))
    return frozenset(found)


def address_of(peer: str) -> str:
    """Return the address of a peer, without its port."""
    kind, _, rest = peer.partition(":")
    return f"{kind}:{rest.rpartition(':')[0]}"


class Connections:
    """The connections to one port of this process.

    Args:
        port: of the server.
        settings: the bounds.
        accepted: returns the peers with a call that was accepted.
    """

    def __init__(self, port: int, settings: GrpcSettings, accepted: Callable[[], set[str]]) -> None:
        self._port = port
        self._settings = settings
        self._accepted = accepted
        self._since: dict[str, float] = {}

    def now(self) -> frozenset[str]:
        """Return the peers that are connected now."""
        return connected(self._port)

    def look(self, peers: frozenset[str], now: float) -> set[str]:
        """Return the peers to close.

        Of an address with too many connections, those without an accepted call are closed before others, and new ones before old.

        Args:
            peers: that are connected.
            now: seconds of a clock.
        """
        self._since = {peer: self._since.get(peer, now) for peer in peers}
        accepted, settings = self._accepted(), self._settings
        close = {
            peer
            for peer, since in self._since.items()
            if peer not in accepted and now - since > settings.keyless_seconds
        }
        if settings.connections_per_peer:
            addresses = defaultdict(list)
            for peer in peers - close:
                addresses[address_of(peer)].append(peer)
            for held in addresses.values():
                held.sort(key=lambda peer: (peer not in accepted, self._since[peer]))
                close.update(held[settings.connections_per_peer :])
        return close

    async def watch(self, gone: Callable[[frozenset[str]], object]) -> None:
        """Look again and again, and close what is to be closed.

        Args:
            gone: called with the peers that are connected.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                peers = await asyncio.to_thread(self.now)
                close = self.look(peers, time.monotonic())
                gone(peers - close)
                if close:
                    closed = await asyncio.to_thread(shut_down, self._port, close)
                    logger.warning("%d connections were closed that are beyond the bounds", closed)
            except Exception:
                logger.exception("the connections could not be counted")


def shut_down(port: int, peers: set[str]) -> int:
    """Shut down this process's sockets between a port and peers; return how many."""
    closed = 0
    for descriptor in _descriptors():
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        with copy:
            with contextlib.suppress(OSError):
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.getsockname()[1] != port:
                    continue
                host, number, *_ = copy.getpeername()
                if _peer(host, number) in peers:
                    copy.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # the process has made itself unreadable, and its own list with it
        return list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _named(remote: str) -> str:
    """Return a peer of the kernel's table, whose words have this machine's byte order."""
    address, _, port = remote.partition(":")
    words = [int(address[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(address), 8)]
    return _peer(str(ipaddress.ip_address(b"".join(words))), int(port, 16))


def _peer(host: str, port: int) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return f"ipv4:{address}:{port}" if address.version == 4 else f"ipv6:[{address}]:{port}"
