"""Files in shared memory that a service's processes use, so that those of killed processes can be removed.

vLLM's processes exchange messages through shared memory. Whoever made a segment removes it on an orderly end; Ray ends
workers by killing them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def mapped_by(processes: Iterable[int]) -> set[Path]:
    """Return the files in shared memory that processes, given by id, have mapped and that still have a name."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                # address permissions offset device inode path
                path = line.split(maxsplit=5)[5:]
                if path and path[0].startswith(f"{SHARED_MEMORY}/") and not path[0].endswith(" (deleted)"):
                    found.add(Path(path[0]))
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove files that nobody uses any more."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
