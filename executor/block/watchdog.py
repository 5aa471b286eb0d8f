"""The watchdog: a process that ends its worker when a block holds it and cannot be ended.

A block runs on the thread of the forward pass. The budget's timer (`executor.block.budget`) ends Python code; it cannot end one
long call in C, and a block can switch the timer off. So a worker writes into memory that it shares with its watchdog until when
the code that runs must have come back. The watchdog needs nothing of the worker's interpreter, whose lock such a call may hold.
When the time has passed, the watchdog tells the engine which trace it was, over the worker's connection to the engine
(`executor.cluster.liveness`), and ends the worker with SIGKILL. The engine is restarted as after any loss of a worker.

A thread of the worker also writes the time twice a second, from the first block on. If the interpreter's lock is held for too
long while no block runs, by a thread that outlived its block, the watchdog ends the worker as well, and blames no trace.

This file is run as a script, by an interpreter without packages: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 5.0  # beyond the block's own time
_BEAT_SECONDS = 0.5
_POLL_SECONDS = 0.25

# What the memory holds: until when, the last beat and how old it may become, all on the monotonic clock, 0 for none; the trace.
_NUMBERS = struct.Struct("<ddd")
_NAME_BYTES = 128
_SIZE = _NUMBERS.size + _NAME_BYTES


class Heartbeat:
    """The worker's side.

    Args:
        memory: what the watchdog looks at.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self._numbers = view[: _NUMBERS.size].cast("d")
        self._name = view[_NUMBERS.size : _SIZE]
        self._beating = False

    def arm(self, deadline: float, name: bytes) -> None:
        """Code of a block runs, and is back `GRACE_SECONDS` after `deadline` or never.

        Args:
            deadline: on the monotonic clock.
            name: the trace's id, of the length that `padded` gives it.
        """
        self._name[:] = name
        self._numbers[0] = deadline + GRACE_SECONDS

    def disarm(self) -> None:
        """The code is back."""
        self._numbers[0] = 0.0

    def beat(self, patience: float) -> None:
        """Start the thread that shows that the interpreter's lock is free, once.

        Args:
            patience: seconds without a beat after which the worker is ended.
        """
        if not self._beating:
            self._beating = True
            threading.Thread(target=self._keep_beating, args=(patience,), name="interpose-beat", daemon=True).start()

    def _keep_beating(self, patience: float) -> None:
        self._numbers[1] = time.monotonic()
        self._numbers[2] = patience
        while True:
            time.sleep(_BEAT_SECONDS)
            self._numbers[1] = time.monotonic()


def padded(name: str) -> bytes:
    """Return a trace's id as `Heartbeat.arm` takes it."""
    return name.encode(errors="replace")[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


_started: tuple[Heartbeat, subprocess.Popen[bytes]] | None = None


def heartbeat() -> Heartbeat | None:
    """Return this process's heartbeat; None where it has no watchdog."""
    return _started[0] if _started is not None else None


def start(line: int = -1) -> None:
    """Give this process a watchdog.

    Args:
        line: the descriptor of the connection on which the watchdog tells the trace; -1: nobody is told.
    """
    global _started
    memory = os.memfd_create("interpose-watchdog")
    os.ftruncate(memory, _SIZE)
    mine = os.pidfd_open(os.getpid())
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(memory), str(mine), str(line)],
            pass_fds=[memory, mine, *([line] if line >= 0 else [])],
            env={},
            stdin=subprocess.DEVNULL,
        )
        _started = Heartbeat(mmap.mmap(memory, _SIZE)), child
    finally:
        os.close(memory)
        os.close(mine)


def watch(memory: int, process: int, line: int) -> None:
    """Look at a worker until it is gone; end it when it is stuck.

    Args:
        memory, process, line: descriptors of the shared memory, the worker, and its connection to the engine.
    """
    shared = mmap.mmap(memory, _SIZE, prot=mmap.PROT_READ)
    gone = select.poll()
    gone.register(process, select.POLLIN)
    while not gone.poll(_POLL_SECONDS * 1000):
        until, beat, patience = _NUMBERS.unpack_from(shared)
        now = time.monotonic()
        overdue = until and now > until
        # While a block runs its own time counts: it may keep the lock for all of it, and the last beat is older than its begin.
        if not overdue and (until or not beat or now <= beat + patience):
            continue
        if overdue and line >= 0:
            with contextlib.suppress(OSError):
                os.write(line, shared[_NUMBERS.size : _SIZE].rstrip(b"\0") + b"\n")
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key pressed in the terminal; it ends with the worker
    watch(*map(int, sys.argv[1:]))
