"""The sandboxed processes that the scheduler may count on.

The worker that has the processes says with a step's output how many of them wait for a trace. The scheduler takes off what it has
given away in steps whose output it does not have yet. While the engine is idle there are no steps, and processes may end unheard.
So a request that finds the engine idle waits for a step without rows, which says how many there are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from executor.core.request import InvokeRequest
from executor.plugin.waiting_room import Traced

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# Seconds that a request waits for a process. Then it starts, and its worker says why there is none.
MOST_SECONDS = 120.0


class Processes:
    """How many sandboxed processes wait for a trace.

    Args:
        used: whether blocks run in sandboxed processes here.
        waiting: the traced requests that wait, by id; the scheduler changes it.

    Attributes:
        told: how many there were at the end of the last step that said so.
        given: the steps whose end is not told yet in which processes were given away, and how many.
        doubted: whether the engine has been idle since a step said so.
    """

    def __init__(self, used: bool, waiting: Mapping[str, Traced]) -> None:
        self.told = 1  # a worker starts when it has one
        self.doubted = False
        self._used = used
        self._waiting = waiting
        self.given: deque[tuple[SchedulerOutput, int]] = deque()
        self._since: dict[str, float] = {}  # when the requests that wait came, by id

    @property
    def free(self) -> int:
        """How many are left for further traces."""
        return 0 if self.doubted else max(0, self.told - sum(number for _, number in self.given))

    def needed(self, request_id: str, invoke: InvokeRequest, idle: bool = False) -> str:
        """Return the trace whose process a new request needs, "" if it needs none.

        Args:
            request_id: of the request.
            invoke: what the request is.
            idle: whether the engine has no other request.
        """
        if not self._used or invoke.trusted:
            return ""
        self.doubted = self.doubted or idle
        self._since[request_id] = time.monotonic()
        return invoke.trace

    def served(self, traced: Iterable[Traced]) -> set[str]:
        """Return the traces that need no further process.

        They have one, or have waited too long for one.

        Args:
            traced: the traced requests that wait or run.
        """
        if not self._used:
            return set()
        self._since = {one: at for one, at in self._since.items() if one in self._waiting}
        latest = time.monotonic() - MOST_SECONDS
        return {entry.sandboxed for entry in traced if self._since.get(entry.request.request_id, latest) <= latest}

    def give(self, output: SchedulerOutput, started: Collection[Traced], traced: Iterable[Traced]) -> None:
        """Note which requests start in a step.

        Args:
            output: the step.
            started: the traced requests that start in it, as far as they wait no longer.
            traced: the traced requests that wait or run.
        """
        if not self._used or not started:
            return
        served = {entry.sandboxed for entry in traced if entry not in started and self._runs(entry)}
        traces = {entry.sandboxed for entry in started if self._runs(entry)} - served - {""}
        if traces:
            self.given.append((output, len(traces)))

    def _runs(self, entry: Traced) -> bool:
        return entry.request.request_id not in self._waiting

    def tell(self, output: SchedulerOutput, told: int | None) -> None:
        """Note that a step has ended.

        Args:
            output: the step.
            told: how many processes wait; None: as many as before.
        """
        if self.given and self.given[0][0] is output:
            self.given.popleft()
        if told is not None:
            self.told = told
        self.doubted = False
