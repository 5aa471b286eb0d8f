"""The sandboxed processes of a worker: its zygote, and some that wait for traces.

A process serves one trace and ends with it. So nothing of a trace is there when the next one comes.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

from executor.core.errors import Refusal
from executor.sandbox.channel import HEAD, MOST_BODY, Kind, Shared
from executor.sandbox.codec import Malformed, decode, encode
from executor.sandbox.first import ENVIRONMENT, FAILED, INHERITED, MOST_REASON
from executor.sandbox.kernel import missing
from executor.sandbox.zygote import FORK, FORKED, LENGTH, Setup
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

READY = 4  # processes that wait for a trace
_FIRST_SECONDS = 120.0  # until the zygote has loaded all
_NEXT_SECONDS = 1.0  # until a process is there
_ORPHAN_SECONDS = 0.01  # from the end of a process to that of its zygote, where it ended with it
_END_SECONDS = 0.2  # from the end of the zygote's line to the end of the zygote
_START = "import sys; sys.path[:] = {path!r}; from executor.sandbox.first import begin; begin({line})"


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
    """

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
        self._poll = select.poll()
        self._poll.register(line.fileno(), select.POLLIN)
        self._number = 0
        self._came = bytearray()

    @property
    def waits(self) -> bool:
        """Whether it is there and says nothing."""
        self._poll.modify(self._line.fileno(), select.POLLIN)
        return not self._poll.poll(0)

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
        body = encode(value, self._shared.down)
        self._number = number
        data = memoryview(HEAD.pack(len(body), kind, number) + body)
        while data:
            try:
                data = data[self._line.send(data) :]
            except BlockingIOError:
                self._wait(until, select.POLLOUT)
            except OSError:
                raise self._gone() from None

    def receive(self, until: float) -> tuple[Kind, Any]:
        """Return the next notice or the answer.

        Raises:
            Lost: the process is gone, took too long, or sent what is no message.
        """
        size, kind, number = HEAD.unpack(self._read(HEAD.size, until))
        if size > MOST_BODY:
            raise Lost(f"it sent a message of {size} bytes")
        body = self._read(size, until)
        if number != self._number:
            raise Lost(f"it answered the question {number} in the place of {self._number}")
        try:
            return Kind(kind), decode(body, self._shared.up)
        except (Malformed, ValueError) as error:
            raise Lost(f"it sent no message: {error}") from None

    def _read(self, size: int, until: float) -> bytes:
        came = self._came
        while len(came) < size:
            try:
                part = self._line.recv(1 << 16)
            except BlockingIOError:
                self._wait(until, select.POLLIN)
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

    def _wait(self, until: float, events: int) -> None:
        left = until - time.monotonic()
        self._poll.modify(self._line.fileno(), events)
        if left <= 0 or not self._poll.poll(left * 1000):
            raise Lost("it took too long", overdue=True)

    def end(self, lost: bool = False) -> None:
        """End the process, whatever it does. Idempotent.

        Args:
            lost: whether it is ended because a question to it did not end well.
        """
        if self.open:
            self.open, self.lost = False, lost
            try:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            except ProcessLookupError:  # it has ended
                pass
            os.close(self._handle)
            self._line.close()


class Pool:
    """The sandboxed processes of one worker.

    Args:
        ready: how many processes wait for a trace.

    Attributes:
        lacks: what this machine lacks for such processes; [] if there is all. Where something lacks, there is no process.
        taken: processes that were given to a trace so far.
        killed: processes of these that were lost, as far as the pool has looked.
    """

    def __init__(self, ready: int = READY) -> None:
        self.lacks = missing()
        self._setup: Setup | None = None
        self._ready = ready
        self.taken = self.killed = 0
        self._given: list[Process] = []  # processes that serve a trace, or did so a moment ago
        self._asked = 0  # processes that the zygote was asked for and has not given yet
        self._forks = False  # whether the zygote has given one
        self._waiting: deque[Process] = deque()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def load(self) -> None:
        """Have the zygote load what it needs, while the worker does something else. Idempotent."""
        if self._zygote is None and not self.lacks:
            self._begin()

    def start(self, setup: Setup) -> None:
        """Tell the zygote of the model, and wait until a process is ready.

        Args:
            setup: what the zygote is told.

        Raises:
            RuntimeError: a process did not come in time, and may come the next time.
        """
        self._setup = setup
        if not self.lacks:
            self.load()
            try:
                self._tell()
                self._waiting.append(self._next(_FIRST_SECONDS))
            except (Lost, OSError) as error:
                self.close()
                if isinstance(error, Lost) and error.overdue:
                    raise RuntimeError(f"no sandboxed process could be started: {error}") from None
                self.lacks = [f"a process that can fork ({error})"]
        if self.lacks:
            logger.error("there are no sandboxed processes here, so blocks without trust are refused: %s", self._why())

    def take(self) -> Process:
        """Return a process that has served no trace.

        A worker runs the forward of all requests, so that it waits for a fork at most.

        Raises:
            Refusal: UNAVAILABLE, there is none at the moment; PERMISSION_DENIED, there is none on this machine.
        """
        if self.lacks:
            raise Refusal(
                pb.ERROR_CODE_PERMISSION_DENIED, f"blocks of tenants without trust do not run here: {self._why()}"
            )
        try:
            if self._zygote is None or self._zygote.poll() is not None:
                self._begin()  # the processes of the zygote before have ended with it
                self._tell()
                raise Lost("the process that forks them has ended, and is started again")
            self._ask()
            found = self._fresh()
        except (Lost, OSError) as error:
            raise Refusal(
                pb.ERROR_CODE_UNAVAILABLE, f"there is no sandboxed process at the moment: {error}; submit it again"
            ) from None
        self._ask()
        self.taken += 1
        self._look()
        self._given.append(found)
        return found

    def numbers(self) -> dict[str, float]:
        """Return how many processes were given to traces, and how many of these were lost."""
        self._look()
        return {"sandbox_starts": self.taken, "sandbox_kills": self.killed}

    def _look(self) -> None:
        """Count the processes that were lost since the last look."""
        self.killed += sum(process.lost for process in self._given)
        self._given = [process for process in self._given if process.open]

    def _why(self) -> str:
        """Return why there are no processes."""
        return (
            f"they run in sandboxed processes, for which this machine lacks {', '.join(self.lacks)}; the operator can set the "
            "model's `sandbox` to off, and have the blocks of all tenants run in the workers"
        )

    def _fresh(self) -> Process:
        """Return a process that has not ended while it waited."""
        while self._waiting:
            found = self._waiting.popleft()
            if found.waits:
                return found
            found.end()
        return self._next(_NEXT_SECONDS if self._forks else 0.0)

    def close(self) -> None:
        """End the zygote and all processes that wait. Idempotent."""
        for process in self._waiting:
            process.end()
        self._waiting.clear()
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
            self._zygote = None

    def _begin(self) -> None:
        self.close()
        mine, theirs = socket.socketpair()
        with theirs:
            code = _START.format(path=[entry for entry in sys.path if entry] or [os.getcwd()], line=theirs.fileno())
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", "-c", code],
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT | {name: os.environ[name] for name in INHERITED if name in os.environ},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._line, self._asked, self._forks = mine, 0, False

    def _tell(self) -> None:
        """Give the zygote what it needs to know, and ask for processes.

        The setup lies in a file in memory, so that the worker does not wait until the zygote reads it.
        """
        assert self._line is not None
        told = pickle.dumps(self._setup)
        with os.fdopen(os.memfd_create("interpose-setup", os.MFD_CLOEXEC), "wb") as memory:
            memory.write(told)
            memory.flush()
            socket.send_fds(self._line, [LENGTH.pack(len(told))], [memory.fileno()])
        self._ask()

    def _ask(self) -> None:
        """Ask for as many processes as are to wait."""
        wanted = self._ready - len(self._waiting) - self._asked
        if wanted > 0 and self._line is not None:
            try:
                self._line.sendall(FORK * wanted)
                self._asked += wanted
            except OSError:  # the zygote is gone
                return

    def _next(self, seconds: float) -> Process:
        """Return the next process of the zygote's.

        Raises:
            Lost: it did not come.
        """
        assert self._line is not None and self._zygote is not None
        until = time.monotonic() + seconds
        self._line.settimeout(seconds)
        try:
            told, descriptors, _, _ = socket.recv_fds(self._line, 1 + LENGTH.size, 3)
        except (TimeoutError, BlockingIOError):
            raise Lost("it took too long", overdue=True) from None
        except OSError:
            raise Lost(self._gone()) from None
        if told[:1] == FAILED:
            reason = told[1:] + self._line.recv(MOST_REASON)
            raise Lost(f"the zygote cannot go on: {reason.decode(errors='replace')}")
        if told[:1] != FORKED or len(descriptors) != 3:
            raise Lost(self._gone())
        self._asked -= 1
        line, memory, handle = descriptors
        process = Process(socket.socket(fileno=line), memory, handle, LENGTH.unpack(told[1:])[0], self._zygote)
        try:
            _, ready = process.receive(until)
            if not isinstance(ready, dict) or ready.get("unable") is not None:
                raise Lost(f"it could not give up its rights: {ready}")
        except Lost:
            process.end()
            raise
        self._forks = True
        return process

    def _gone(self) -> str:
        """Return how the zygote ended, which has closed its line."""
        assert self._zygote is not None
        try:
            status = self._zygote.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the zygote has closed its line"
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the zygote has ended {how}; its output is in the worker's log"
