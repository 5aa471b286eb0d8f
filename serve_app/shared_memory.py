"""Removes the shared memory files that killed processes of a service leave behind.

vLLM's processes exchange messages through shared memory. The process that made a segment removes it when it ends in order,
but Ray ends workers by killing them. The segments of a running engine have no name any more
(`executor.cluster.shared_memory`). The segments of an engine that is killed while it starts still have one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import psutil

from executor.cluster.shared_memory import mapped_by


class SharedFiles:
    """The files in shared memory that a service's processes have used."""

    def __init__(self) -> None:
        self._users: dict[Path, set[psutil.Process]] = {}

    def look_after(self, processes: Collection[psutil.Process]) -> None:
        """Note which files the processes have mapped, and remove files of dead processes.

        Args:
            processes: all processes of the service that live.
        """
        for process in processes:
            for file in mapped_by([process.pid]):
                self._users.setdefault(file, set()).add(process)
        alive = {process for process in processes if not _ended(process)}
        for file in [file for file, users in self._users.items() if not users & alive]:
            del self._users[file]
            _remove(file)

    def remove(self) -> None:
        """Remove all files."""
        for file in self._users:
            _remove(file)
        self._users.clear()


def _ended(process: psutil.Process) -> bool:
    """Whether a process has ended or is a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
