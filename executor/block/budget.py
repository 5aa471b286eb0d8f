"""Bounds on what a block may use while it runs: wall time in one step, and memory.

A block runs on the thread that runs the forward, so nobody else can stop it. A repeating interval timer interrupts it:
its handler raises into the block when the block is over budget, and does nothing while the engine's own code runs. The
timer is armed only around a block (some microseconds each way). Signals also interrupt sleeps and lock waits, which
asynchronous exceptions do not; they need the process's main thread, and the workers run their busy loop on it. One
allocation that is larger than the budget is refused by the address-space limit, which is lowered while a block runs.
What no signal interrupts, one long call in C, the worker's watchdog ends together with the worker.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions take longer: they make enumerations of what they return
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from executor.block.round import Round
from executor.block.watchdog import GRACE_SECONDS, Heartbeat, padded
from executor.core.errors import BudgetExceeded
from interpose.v1 import trace_pb2 as pb

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_TICK_SECONDS = 0.05
# Once the time is over. Each of many objects may have a `__del__` that never ends.
_STRUCK_SECONDS, _MANY, _STORM_SECONDS = 0.01, 20, 0.0005
_ALARM = int(signal.SIGALRM)
_ITIMER = int(_signal.ITIMER_REAL)
NOBODY = padded("")
_PAGE = resource.getpagesize()


class _Sizes:
    """The sizes of this process, from a file that stays open: to open it takes longest."""

    def __init__(self) -> None:
        self._process = 0
        self._file = -1

    def pages(self) -> tuple[int, int]:
        """Return this process's virtual size and its resident size without shared memory, in pages."""
        if self._process == os.getpid():  # a file opened before a fork has the sizes of the parent
            try:
                return self._read()
            except (OSError, ValueError):  # other code has closed the file, and its number may be another file's
                pass
        self._process, self._file = os.getpid(), os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        return self._read()

    def _read(self) -> tuple[int, int]:
        virtual, resident, shared = os.pread(self._file, 128, 0).split()[:3]
        return int(virtual), int(resident) - int(shared)


_memory_pages = _Sizes().pages


class Budget:
    """The bounds for every block of one worker.

    Size: half of it notes what the process has of its own, so that each part of it is put back.

    Args:
        step_seconds: wall time one block may take in one step.
        memory_bytes: how much one block may let the process grow in one step.
        heartbeat: tells the worker's watchdog that a block runs (`executor.block.watchdog`), for code that no signal ends.

    Attributes:
        step_seconds, memory_bytes: as given.
        struck: whether the timer has raised since `arm`. Python drops what is raised in a `__del__`.
        round: the round that is open, if a round is.
    """

    def __init__(self, step_seconds: float, memory_bytes: int, heartbeat: Heartbeat | None = None) -> None:
        self.step_seconds = step_seconds
        self.struck = False
        self._strikes = 0
        self._heartbeat = heartbeat
        self.memory_bytes = memory_bytes
        self._running: Callable[[], bool] | None = None
        self._deadline = 0.0
        self._started = 0.0
        self._began = 0.0
        self._base: tuple[int, int] = (0, 0)
        self._bounded = True
        self._collects = False
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        self._main = threading.current_thread() is threading.main_thread()
        self._handler: Any = signal.SIG_DFL
        self._timer: tuple[float, float] = (0.0, 0.0)
        self._tick = self._on_tick
        self._ceiling = self._limits
        self.round = Round()

    def begin_step(self) -> None:
        """Take the process's size now as what a block's growth is measured from."""
        self._base = _memory_pages()
        ceiling = self._base[0] * _PAGE + 2 * self.memory_bytes
        soft, hard = self._limits
        lower = soft == resource.RLIM_INFINITY or ceiling < soft
        self._ceiling = (ceiling, hard) if lower else self._limits

    def begin_round(self) -> None:
        """Begin a round of turns: until `end_round`, nothing but turns of blocks runs.

        The timer runs on between the turns of the round. Each turn sets it anew, for the block before may have changed it.
        """
        self._keep_outside()
        self.round.begin()

    def end_round(self) -> None:
        """End the round: the process has its own timer again."""
        self.round.end()
        self._put_back(time.monotonic() - self._began)

    def arm(self, running: Callable[[], bool], used: float, trace: bytes = NOBODY, memory: bool = True) -> None:
        """Start watching a block.

        Args:
            running: whether the code that an interrupt would hit is the block's.
            used: seconds the block has used in this step already.
            trace: the trace's id (`watchdog.padded`), to be named if nothing but the worker's end ends the block.
            memory: whether the process's growth is bounded too.
        """
        self._bounded = memory
        self.struck = False
        self._strikes = 0
        if not self.round.open:
            self._keep_outside()
        self._started = time.monotonic()
        self._deadline = self._started + max(0.0, self.step_seconds - used)
        gc.disable()  # what others have left to be collected would run here
        if self._heartbeat is not None:
            self._heartbeat.beat(self.step_seconds + GRACE_SECONDS)
            self._heartbeat.arm(self._deadline, trace)
        if self._main:
            if memory:
                resource.setrlimit(resource.RLIMIT_AS, self._ceiling)
            if _signal.getsignal(_ALARM) is not self._tick:
                _signal.signal(_ALARM, self._tick)
            _signal.setitimer(_ITIMER, _TICK_SECONDS, _TICK_SECONDS)
        self._running = running  # from here on a tick may raise

    def disarm(self) -> float:
        """Stop watching; return the seconds since `arm`."""
        self._running = None
        elapsed = time.monotonic() - self._started
        if self._main:  # the engine's own code may need more than a block
            resource.setrlimit(resource.RLIMIT_AS, self._limits)
        if not self.round.open:
            self._put_back(elapsed)
        if self._heartbeat is not None:
            self._heartbeat.disarm()
        return elapsed

    def _keep_outside(self) -> None:
        """Note what is put back when no block runs any more.

        It is the timer, its handler, and whether Python collects.
        """
        self._began = time.monotonic()
        self._collects = gc.isenabled()
        if self._main:
            self._handler = _signal.getsignal(_ALARM)
            self._timer = _signal.getitimer(_ITIMER)

    def _put_back(self, elapsed: float) -> None:
        """Put back what `_keep_outside` noted.

        Args:
            elapsed: the seconds since then.
        """
        if self._main:
            # Someone else's timer goes on where it would be now.
            remaining, interval = self._timer
            _signal.setitimer(_ITIMER, max(remaining - elapsed, 1e-6) if remaining else 0.0, interval)
            _signal.signal(_ALARM, self._handler)
        (gc.enable if self._collects else gc.disable)()  # whichever of them the block called

    def run(self, do: Callable[[], T], used: float, trace: bytes) -> tuple[T, float]:
        """Call code of the engine that may run code of a block's objects.

        Such code encodes the objects, or drops them.

        Args:
            do: what to call. It may be broken off anywhere.
            used, trace: as of `arm`.

        Returns:
            What `do` returned, and the seconds that it took.

        Raises:
            BudgetExceeded: it took longer than the block may. What a `__del__` raises is dropped by Python, so that `do` may have
                come to its end.
        """
        running = True
        self.arm(lambda: running, used, trace, memory=False)
        try:
            try:
                done = do()
            finally:
                running = False
        finally:
            elapsed = self.disarm()
        if self.struck:
            raise self.exceeded()
        return done, elapsed

    def exceeded(self) -> BudgetExceeded:
        """What ends a block that took too long."""
        return BudgetExceeded(
            pb.ERROR_CODE_DEADLINE_EXCEEDED,
            f"the block ran longer than the {self.step_seconds:g} s it may take in one step; end its loop, or do the "
            "work in the notebook after the trace",
        )

    def _on_tick(self, signum: int, frame: Any) -> None:
        running = self._running
        if running is None or not running() or (frame is not None and frame.f_code in _UNBROKEN):
            return
        if time.monotonic() >= self._deadline:
            self.struck = True
            self._strikes += 1
            if self._strikes in (1, _MANY):
                seconds = _STRUCK_SECONDS if self._strikes == 1 else _STORM_SECONDS
                signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
            raise self.exceeded()
        if not self._bounded:
            return
        if self._grown() > self.memory_bytes:
            gc.collect()
            grown = self._grown()
            if grown <= self.memory_bytes:
                return
            raise BudgetExceeded(
                pb.ERROR_CODE_QUOTA_EXCEEDED,
                f"the block let memory grow by {grown >> 20} MiB in one step, more than the {self.memory_bytes >> 20} MiB "
                "it may; keep less, or save values and drop them",
            )

    def _grown(self) -> int:
        return (_memory_pages()[1] - self._base[1]) * _PAGE


_SETTERS = (
    Budget.arm,
    Budget.disarm,
    Budget.run,
    Budget.begin_round,
    Budget.end_round,
    Budget._keep_outside,
    Budget._put_back,
)
# Code that arms and disarms: broken off there, a budget would stay armed. The next tick comes later.
_UNBROKEN: set[CodeType] = {function.__code__ for function in _SETTERS}


def unbroken(function: F) -> F:
    """Mark a function that arms and disarms a budget.

    The timer raises in the functions that it calls, not in the function itself.
    """
    _UNBROKEN.add(function.__code__)
    return function
