"""The worker's end of the channel to one sandboxed process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from typing import Any

from executor.sandbox.channel import HEAD, MOST_BODY, MOST_NUMBER, TURNS, Kind, Shared
from executor.sandbox.codec import Known, Malformed, decode, encode, encode_turn
from executor.sandbox.spare import Spare, look

_ORPHAN_SECONDS = 0.01  # from the end of a process to that of its zygote, where it ended with it


_spare = Spare()


class Lost(Exception):
    """A sandboxed process can be asked nothing any more.

    Attributes:
        overdue: whether it took too long.
        orphaned: whether it ended because its zygote did, whatever its block did.
    """

    def __init__(self, why: str, overdue: bool = False, orphaned: bool = False) -> None:
        super().__init__(why)
        self.overdue = overdue
        self.orphaned = orphaned


class Process:
    """The worker's end of the channel to one sandboxed process.

    Args:
        line: the socket.
        memory: the descriptor of the shared memory.
        handle: the process's pidfd.
        number: its process id.
        zygote: the process that has forked it.

    Attributes:
        number: as given.
        open: whether it can still be asked.
        lost: whether it was ended because a question to it did not end well.
        many: how many of them are open in this worker.
    """

    many = 0

    def __init__(
        self, line: socket.socket, memory: int, handle: int, number: int, zygote: subprocess.Popen[bytes]
    ) -> None:
        self.number = number
        self._zygote = zygote
        self.open = True
        self.lost = False
        self._line = line
        self._line.setblocking(False)
        self._handle = handle
        try:
            self._shared = Shared(memory)
        finally:
            os.close(memory)
        self._coming, self._going = select.poll(), select.poll()
        self._coming.register(line.fileno(), select.POLLIN)
        self._going.register(line.fileno(), select.POLLOUT)
        self._before = 0  # what the process had sent when it was asked
        self._awake = False  # whether the next wait looks for the answer before it sleeps
        self._number = 0
        self._came = bytearray()
        self._known = Known()
        Process.many += 1

    def fileno(self) -> int:
        """Return the descriptor of its line."""
        return self._line.fileno()

    @property
    def waits(self) -> bool:
        """Whether it is there and says nothing."""
        return not self._coming.poll(0)

    def send(self, kind: Kind, value: Any, until: float) -> None:
        """Ask something.

        Args:
            until: when it must be over, on the monotonic clock.

        Raises:
            Refusal: the values are too large.
            Lost: the process is gone.
        """
        self._send(kind, value, until, self._number + 1)

    def go(self, value: Any, until: float) -> None:
        """Answer a notice; it raises what `send` raises."""
        self._send(Kind.GO, value, until, self._number)

    def _send(self, kind: Kind, value: Any, until: float, number: int) -> None:
        if not self.open:
            raise Lost("it has ended")
        body = encode_turn(value, self._shared.down) if kind in TURNS else None
        if body is None:
            body = encode(value, self._shared.down)
        self._number = number
        shared = self._shared
        self._before, self._awake = shared.sent_up[0], _spare.there(Process.many)
        shared.waits_awake[0] = self._awake
        data = memoryview(HEAD.pack(len(body), kind, number) + body)
        while data:
            try:
                data = data[self._line.send(data) :]
            except BlockingIOError:
                self._wait(until, self._going)
            except OSError:
                raise self._gone() from None
        shared.sent_down[0] = (shared.sent_down[0] + 1) & MOST_NUMBER

    def receive(self, until: float) -> tuple[Kind, Any]:
        """Return the next notice or the answer.

        Raises:
            Lost: the process is gone, took too long, or sent what is no message.
        """
        if self._awake:
            self._awake = False
            look(self._shared.sent_up, self._before)
        size, kind, number = HEAD.unpack(self._read(HEAD.size, until))
        if size > MOST_BODY:
            raise Lost(f"it sent a message of {size} bytes")
        body = self._read(size, until)
        if number != self._number:
            raise Lost(f"it answered the question {number} in the place of {self._number}")
        try:
            return Kind(kind), decode(body, self._shared.up, self._known)
        except (Malformed, ValueError) as error:
            raise Lost(f"it sent no message: {error}") from None

    def _read(self, size: int, until: float) -> bytes:
        came = self._came
        while len(came) < size:
            self._wait(until, self._coming)
            try:
                part = self._line.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                part = b""
            if not part:
                raise self._gone()
            came += part
        data = bytes(came[:size])
        del came[:size]
        return data

    def _gone(self) -> Lost:
        """Return why the process has closed its line.

        A process ends with its zygote, a moment before the zygote can be waited for.
        """
        try:
            self._zygote.wait(_ORPHAN_SECONDS)
        except subprocess.TimeoutExpired:
            return Lost("it ended from within, or ran out of memory")
        return Lost("the process that had forked it has ended", orphaned=True)

    def _wait(self, until: float, poll: select.poll) -> None:
        left = until - time.monotonic()
        if not poll.poll(max(0.0, left * 1000)):
            raise Lost("it took too long", overdue=True)

    def end(self, lost: bool = False) -> None:
        """End the process, whatever it does. Idempotent.

        Args:
            lost: whether it is ended because a question to it did not end well.
        """
        if self.open:
            self.open, self.lost = False, lost
            Process.many -= 1
            try:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            except ProcessLookupError:  # it has ended
                pass
            os.close(self._handle)
            self._line.close()
