"""The sandboxed processes of a worker: its zygote, and some that wait for traces.

A process serves one trace and ends with it. So nothing of a trace is there when the next one comes.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections import deque

from executor.core.errors import Refusal
from executor.sandbox.first import FAILED, MOST_REASON, environment
from executor.sandbox.kernel import missing
from executor.sandbox.process import Lost, Process
from executor.sandbox.zygote import FORK, FORKED, LENGTH, Setup
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

READY = 4  # processes that wait for a trace
_FOR_SCANS = 1  # of these processes: a scan is no request of the scheduler's, and takes no promised process
_FIRST_SECONDS = 120.0  # until the zygote has loaded all
_NEXT_SECONDS = 1.0  # until a process is there
_LOOK_SECONDS = 1.0  # between looks for processes that have ended while they waited
_LOADS = 4  # while the zygote loads, the wait for a process may be this many times as long
_AGAIN_SECONDS = 5.0  # from the start of a zygote to that of the next
_MANY = 1 << 30  # processes, where there is none: then no trace waits for one
_END_SECONDS = 0.2  # from the end of the zygote's line to the end of the zygote
_START = "import sys; sys.path[:] = {path!r}; from executor.sandbox.first import begin; begin({line})"


class Pool:
    """The sandboxed processes of one worker.

    Size: the zygote, and what has become of each process that it was asked for.

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
        self._coming: deque[Process] = deque()  # processes that have not said yet that they are ready
        self._told = -1  # processes that `news` counted in its last call
        self._promised = 1  # counted processes that requests may still take: a worker starts when one process waits
        self._began = 0.0  # when the zygote was started, on the monotonic clock
        self._looked = 0.0  # when the pool last looked for ended processes, on the monotonic clock
        self._fault = ""  # why there was no process at the last look
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
                self._await(_FIRST_SECONDS)
            except (Lost, OSError) as caught:
                error = caught if isinstance(caught, Lost) else Lost(self._gone())
                self.close()
                if error.overdue:
                    raise RuntimeError(f"no sandboxed process could be started: {error}") from None
                self.lacks = [f"a process that can fork ({error})"]
        if self.lacks:
            logger.error("there are no sandboxed processes here, so blocks without trust are refused: %s", self._why())

    def take(self, promised: bool = True) -> Process:
        """Return a process that has served no trace.

        A worker runs the forward of all requests, so that it waits for a fork at most. A trace waits before that, in the
        scheduler's room (`executor.plugin.processes`).

        Args:
            promised: whether `news` has counted the process; otherwise `ready` has said that a process waits beyond these.

        Raises:
            Refusal: UNAVAILABLE, there is none at the moment; PERMISSION_DENIED, there is none on this machine.
        """
        if self.lacks:
            raise Refusal(
                pb.ERROR_CODE_PERMISSION_DENIED, f"blocks of tenants without trust do not run here: {self._why()}"
            )
        try:
            if self._again():
                raise Lost(self._fault)
            self._ask()
            found = self._fresh()
        except (Lost, OSError) as error:
            raise Refusal(
                pb.ERROR_CODE_UNAVAILABLE, f"there is no sandboxed process at the moment: {error}; submit it again"
            ) from None
        self._ask()
        self.taken += 1
        self._promised = max(0, self._promised - promised)
        self._look()
        self._given.append(found)
        return found

    def news(self, seconds: float = 0.0) -> int | None:
        """Take in the processes that have come; return how many wait for requests.

        The answer is None if as many wait as at the last call. One more waits for scans.

        Args:
            seconds: how long to wait if there is none; longer while the zygote loads, which needs the processor.
        """
        waiting = _MANY
        if not self.lacks:
            try:
                running = not self._again()
                self._drop_ended()
                if not running:
                    time.sleep(seconds)
                elif len(self._waiting) < self._ready:
                    self._take_in(seconds if self._forks else _LOADS * seconds)
                    self._ask()
            except (Lost, OSError) as error:
                self._fault = str(error)
            waiting = max(0, len(self._waiting) - _FOR_SCANS)
        self._promised = waiting
        if waiting == self._told:
            return None
        self._told = waiting
        return waiting

    @property
    def ready(self) -> bool:
        """Whether a scan need not wait.

        There is a process that no request was promised, or there is none on this machine.
        """
        if not self.lacks:
            try:
                running = not self._again()
                self._drop_ended()
                if running:
                    self._take_in(0.0)
                    self._ask()
            except (Lost, OSError) as error:
                self._fault = str(error)
        return bool(self.lacks) or len(self._waiting) > self._promised

    def _drop_ended(self) -> None:
        """Forget processes that have ended while they waited."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            for process in [one for one in self._waiting if not one.waits]:
                self._waiting.remove(process)
                process.end()

    def _again(self) -> bool:
        """Start another zygote if there is none; return whether there was none."""
        if self._zygote is not None and self._zygote.poll() is None:
            return False
        self._end_all()  # the processes of the zygote before have ended with it
        if time.monotonic() - self._began > _AGAIN_SECONDS:
            self._fault = "the process that forks them has ended, and is started again"
            self._begin()
            self._tell()
        return True

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
        self._await(_NEXT_SECONDS if self._forks else 0.0)
        return self._waiting.popleft()

    def close(self) -> None:
        """End the zygote and all processes that wait. Idempotent."""
        self._end_all()
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
            self._zygote = None

    def _end_all(self) -> None:
        """End the processes that wait."""
        for process in (*self._waiting, *self._coming):
            process.end()
        self._waiting.clear()
        self._coming.clear()

    def _begin(self) -> None:
        self.close()
        self._began = time.monotonic()
        mine, theirs = socket.socketpair()
        with theirs:
            code = _START.format(path=[entry for entry in sys.path if entry] or [os.getcwd()], line=theirs.fileno())
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", "-c", code],
                pass_fds=[theirs.fileno()],
                env=environment(),
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
        wanted = self._ready - len(self._waiting) - len(self._coming) - self._asked
        if wanted > 0 and self._line is not None:
            try:
                self._line.sendall(FORK * wanted)
                self._asked += wanted
            except OSError:  # the zygote is gone
                return

    def _await(self, seconds: float) -> None:
        """Wait until a process is ready.

        Raises:
            Lost: none came.
        """
        self._take_in(seconds)
        if not self._waiting:
            raise Lost("it took too long", overdue=True)

    def _take_in(self, seconds: float) -> None:
        """Take in the processes that have come, and wait for one if none is ready.

        Raises:
            Lost: the zygote, or a process, cannot go on.
        """
        until = time.monotonic() + seconds
        while True:
            self._receive()
            left = until - time.monotonic()
            if self._waiting or left <= 0:
                return
            poll = select.poll()
            for one in (self._line, *self._coming):
                poll.register(one, select.POLLIN)  # type: ignore[arg-type]
            poll.poll(left * 1000)

    def _receive(self) -> None:
        """Take in what has come, without waiting for more.

        Raises:
            Lost: the zygote, or a process, cannot go on.
        """
        assert self._line is not None
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        while poll.poll(0):
            self._coming.append(self._forked(self._line))
        for process in list(self._coming):
            if process.waits:
                continue
            self._coming.remove(process)
            try:
                _, ready = process.receive(time.monotonic() + _NEXT_SECONDS)
                if not isinstance(ready, dict) or ready.get("unable") is not None:
                    raise Lost(f"it could not give up its rights: {ready}")
            except Lost:
                process.end()
                raise
            self._forks, self._fault = True, ""
            self._waiting.append(process)

    def _forked(self, line: socket.socket) -> Process:
        """Return the next process of the zygote's, which has said something.

        Raises:
            Lost: that was no process.
        """
        assert self._zygote is not None
        line.settimeout(_NEXT_SECONDS)
        try:
            told, descriptors, _, _ = socket.recv_fds(line, 1 + LENGTH.size, 3)
        except OSError:
            raise Lost(self._gone()) from None
        if told[:1] == FAILED:
            reason = told[1:] + line.recv(MOST_REASON)
            raise Lost(f"the zygote cannot go on: {reason.decode(errors='replace')}")
        if told[:1] != FORKED or len(descriptors) != 3:
            raise Lost(self._gone())
        self._asked -= 1
        channel, memory, handle = descriptors
        return Process(socket.socket(fileno=channel), memory, handle, LENGTH.unpack(told[1:])[0], self._zygote)

    def _gone(self) -> str:
        """Return how the zygote ended, which has closed its line."""
        assert self._zygote is not None
        try:
            status = self._zygote.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._zygote.kill()  # it forks no more
            return "the zygote has closed its line"
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the zygote has ended {how}; its output is in the worker's log"
