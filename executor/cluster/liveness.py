"""Idle connections between the engine and its workers.

The end of a connection tells either side that the other is gone. An engine also ends when its replica does. Nothing is sent
on it but what a worker's watchdog says before it ends the worker (`executor.block.watchdog`). The kernels at both ends ask
each other whether they are still there, so that neither a busy interpreter nor a block that holds its lock looks like a dead
worker. A process that dies ends its connection at once; a node that is cut off does so for the others within
`SILENCE_SECONDS`, and for itself, if its own cable is out, within a minute. Ray notices the first within seconds and the
second within a minute, and a worker that waits for another in a collective operation notices neither.
"""

from __future__ import annotations

import contextlib
import hmac
import multiprocessing
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

# The first question after so many seconds without traffic, then one each second, and after so many without an answer it is over.
_IDLE_SECONDS = 2
_INTERVAL_SECONDS = 1
_QUESTIONS = 4
SILENCE_SECONDS = _IDLE_SECONDS + _INTERVAL_SECONDS * _QUESTIONS

_TOKEN_BYTES = 32
_RANK_BYTES = 4
_CONNECT_SECONDS = 30.0
_GREETING_SECONDS = 1.0  # workers have said who they are long before they are asked


@dataclass(frozen=True)
class Ticket:
    """What a worker needs to connect.

    Attributes:
        host, port: where the engine listens.
        token: proves that it is one of the engine's workers.
    """

    host: str
    port: int
    token: bytes


class Lifeline:
    """The engine's ends.

    Args:
        host: the address of this node in the cluster; it listens there.
        world_size: how many workers there are.

    Attributes:
        overdue: the ids of traces for which watchdogs ended workers.
    """

    def __init__(self, host: str, world_size: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._world_size = world_size
        self._listener = socket.create_server((host, 0), family=family, backlog=world_size + 16)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self.overdue: list[str] = []
        self.ticket = Ticket(host, int(self._listener.getsockname()[1]), secrets.token_bytes(_TOKEN_BYTES))

    def accept(self) -> None:
        """Take every worker's connection; to be called when all have made theirs.

        Raises:
            RuntimeError: one of them is missing.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS
        missing = set(range(self._world_size))
        while missing:
            try:
                # Not for ever, however many others knock.
                self._listener.settimeout(_left(deadline))
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise RuntimeError(f"workers {sorted(missing)} did not connect to the engine") from None
            rank = self._greeting(connection)
            if rank not in missing:
                connection.close()  # somebody else in the network
                continue
            missing.discard(rank)
            _keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._listener.close()

    def lost(self, timeout: float) -> list[int]:
        """Return the ranks whose connections have ended.

        The call waits for the first of them, at most `timeout` seconds.
        """
        with self._lock:
            if self._selector.get_map() is None:  # it has been closed
                return []
            return sorted(key.data for key, _ in self._selector.select(timeout) if self._ended(key.fileobj))

    def close(self) -> None:
        """End all connections: workers that are still there exit. Idempotent."""
        self._listener.close()
        with self._lock:
            for key in list((self._selector.get_map() or {}).values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _ended(self, connection: Any) -> bool:
        """Whether a connection that can be read has ended; what a watchdog says comes before that."""
        try:
            said = connection.recv(4096)
        except OSError:
            return True
        self.overdue += said.decode(errors="replace").split()
        return not said

    def _greeting(self, connection: socket.socket) -> int:
        """Return the rank that a connection belongs to, -1 if it is no worker's."""
        deadline = time.monotonic() + _GREETING_SECONDS
        said = b""
        with contextlib.suppress(OSError):
            while len(said) < _TOKEN_BYTES + _RANK_BYTES:
                connection.settimeout(_left(deadline))
                more = connection.recv(_TOKEN_BYTES + _RANK_BYTES - len(said))
                if not more:
                    break
                said += more
        token, rank = said[:_TOKEN_BYTES], said[_TOKEN_BYTES : _TOKEN_BYTES + _RANK_BYTES]
        return int.from_bytes(rank, "big") if hmac.compare_digest(token, self.ticket.token) else -1


def _left(deadline: float) -> float:
    """Return the seconds until a deadline.

    Raises:
        TimeoutError: it has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def hold(ticket: Ticket, rank: int) -> int:
    """Connect to the engine; this process exits when the engine is gone.

    Returns:
        The connection's descriptor.

    Raises:
        OSError: the engine cannot be reached.
    """
    connection = socket.create_connection((ticket.host, ticket.port), _CONNECT_SECONDS)
    connection.sendall(ticket.token + rank.to_bytes(_RANK_BYTES, "big"))
    connection.settimeout(None)
    _keep_alive(connection)
    threading.Thread(target=_exit_with, args=(connection,), name="interpose-lifeline", daemon=True).start()
    return connection.fileno()


def exit_with_parent() -> None:
    """Have this process exit when its parent process is gone.

    Nothing happens in a process that multiprocessing has not started. An engine replica that is killed shuts nothing down.
    Ray ends its workers when it comes to it, and where Ray itself is ending an engine that asks it for anything then can wait
    for a minute.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), name="interpose-parent", daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _exit_with(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)
    # The main thread may wait for another rank for ever; nobody is left whom it could tell anything.
    os._exit(1)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _QUESTIONS)
