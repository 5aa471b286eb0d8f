"""Files in shared memory that a service's processes use, so that those of killed processes can be removed.

vLLM's processes exchange messages through shared memory. Whoever made a segment removes it on an orderly end; Ray ends
workers by killing them. Those of an engine that runs have no name any more (`executor.cluster.shared_memory`); those of one
that is killed while it starts do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import psutil

from executor.cluster.shared_memory import mapped_by


class SharedFiles:
    """The files in shared memory that processes have used."""

    def __init__(self) -> None:
        self._users: dict[Path, set[psutil.Process]] = {}

    def look_after(self, processes: Collection[psutil.Process]) -> None:
        """Note what processes, all that live, have mapped, and remove what only dead ones have used."""
        for process in processes:
            for file in mapped_by([process.pid]):
                self._users.setdefault(file, set()).add(process)
        alive = {process for process in processes if not _ended(process)}
        for file in [file for file, users in self._users.items() if not users & alive]:
            del self._users[file]
            _remove(file)

    def remove(self) -> None:
        """Remove all of them."""
        for file in self._users:
            _remove(file)
        self._users.clear()


def _ended(process: psutil.Process) -> bool:
    """Whether nothing is left of a process but an entry for its parent."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
