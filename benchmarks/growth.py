"""Compares the processes of a service with themselves: memory, descriptors, threads."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable

import psutil

from benchmarks.processes import title, zygotes

# The service's own processes, by a part of their titles.
KINDS = ("ProxyActor", "ingress", "Session", "Directory", "engine-", "EngineCore", "LazyWorkerActor")
SANDBOXES = "sandboxes"  # zygotes, and the processes that they have forked
# By how much each may grow, for the process of a kind that has most.
BOUNDS = {"MiB": 400.0, "descriptors": 100.0, "threads": 50.0}
MORE_PROCESSES = 2.0  # of a kind
SETTLE_SECONDS = 60.0


class Growth:
    """Compares the processes of a service with themselves at the beginning.

    Args:
        service: the service's process.
    """

    def __init__(self, service: psutil.Process) -> None:
        self._service = service
        self._before = figures(service.children(recursive=True))

    def settled(self, seconds: float = SETTLE_SECONDS) -> tuple[dict[str, dict[str, float]], list[str]]:
        """Return by how much each figure has grown, and what has grown by more than its bound.

        Args:
            seconds: until what has grown has shrunk again.
        """
        deadline = time.monotonic() + seconds
        while True:
            grown, faults = self._grown()
            if not faults or time.monotonic() > deadline:
                return grown, faults
            time.sleep(1.0)

    def _grown(self) -> tuple[dict[str, dict[str, float]], list[str]]:
        grown: dict[str, dict[str, float]] = {}
        faults = []
        for what, now in figures(self._service.children(recursive=True)).items():
            before = self._before.get(what, {})
            bound = BOUNDS.get(what, MORE_PROCESSES)
            row = grown[f"more {what}"] = {}
            for kind, number in now.items():
                row[kind] = number - before.get(kind, 0.0 if what == "processes" else number)
                if row[kind] > bound:
                    faults.append(f"{kind}: {row[kind]:g} more {what} than {number - row[kind]:g}")
        return grown, faults


def figures(processes: Iterable[psutil.Process]) -> dict[str, dict[str, float]]:
    """Return the number of processes of each kind, and the most that one of them has.

    Args:
        processes: of the service.
    """
    processes = list(processes)
    first, forked = zygotes(processes)
    apart = {one.pid for one in (*first, *forked)}
    counts: collections.Counter[str] = collections.Counter({SANDBOXES: len(apart)})
    found: dict[str, dict[str, float]] = {what: {} for what in BOUNDS}
    for process in processes:
        try:
            if process.pid in apart:
                continue
            name = title(process)
            kind = next((one for one in KINDS if one in name), None)
            if kind is None:
                continue
            counts[kind] += 1
            memory, descriptors = process.memory_info().rss / (1 << 20), process.num_fds()
            for what, number in zip(BOUNDS, (memory, descriptors, process.num_threads()), strict=True):
                found[what][kind] = max(found[what].get(kind, 0.0), float(number))
        except psutil.Error:
            continue
    return found | {"processes": {kind: float(count) for kind, count in counts.items()}}
