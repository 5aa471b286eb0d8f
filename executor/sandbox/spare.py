"""Waits of a worker and a sandboxed process for each other, where there are cores to spare.

A process that sleeps is woken in some tens of microseconds, which is as long as a short turn. So both sides look at a number in
their shared memory for a moment before they sleep. The other side may write what it likes there: then the wait ends early, or
comes to its bound, and the socket decides.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

SECONDS = 0.0002  # that a wait looks without a sleep
_LEAST_CORES = 8
_OTHERS = 4  # cores for the worker, its engine and their threads
_BUSY = 0.5  # the machine's load for each of its cores, from which on none is spare
_LOOK_SECONDS = 1.0  # between looks at the load


class Spare:
    """Whether this process may use cores to wait."""

    def __init__(self) -> None:
        self._until = 0.0
        self._idle = False

    def there(self, processes: int) -> bool:
        """Return whether there are cores to spare.

        Args:
            processes: the sandboxed processes of this worker.
        """
        if processes + _OTHERS > _cores() or _cores() < _LEAST_CORES:
            return False
        now = time.monotonic()
        if now >= self._until:
            self._until = now + _LOOK_SECONDS
            self._idle = os.getloadavg()[0] < _BUSY * (os.cpu_count() or 1)
        return self._idle


@functools.cache
def _cores() -> int:
    """Return the cores that this process may use, as far as its control group says so too."""
    cores = len(os.sched_getaffinity(0))
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if most == "max" else min(cores, int(most) // int(period))
    except (OSError, ValueError):  # another kind of control group, or none
        return cores


def look(number: memoryview, before: int) -> None:
    """Return when a number in the shared memory is another, after `SECONDS` at the latest.

    Args:
        number: the number, as its only item.
        before: the number as it was.
    """
    until = time.monotonic() + SECONDS
    while number[0] == before and time.monotonic() < until:
        pass
