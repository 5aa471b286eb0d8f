"""Removes the names of an engine's shared memory segments once they are in use.

vLLM's processes exchange messages through files in shared memory, and on CPUs with AVX-512 also tensors. On an orderly end
each process removes its files. A killed worker would leave its files behind, up to 240 MiB each, until its node or container
ends. A file without a name ends with the last process that has mapped it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

SHARED_MEMORY = Path("/dev/shm")
_TENSORS = "-cpushm_"  # in the names of those that ranks on CPUs exchange tensors through


def forget_names(queues: Iterable[MessageQueue | None]) -> None:
    """Remove the names of the segments that this process made for queues.

    All readers of the queues must have opened them before.
    """
    for queue in queues:
        ring = queue.buffer if queue is not None else None
        if ring is not None and ring.is_creator:
            ring.shared_memory.unlink()
            ring.is_creator = False  # or it would be removed once more with the ring


def forget_names_of_groups() -> None:
    """Remove the names of the segments that this worker's process groups use.

    All ranks must have their groups before.
    """
    from vllm.distributed import parallel_state

    # vLLM's registry of all of them: which there are depends on the layout.
    groups = [group() for group in parallel_state._groups.values()]
    forget_names(group.mq_broadcaster for group in groups if group is not None)
    for file in mapped_by([os.getpid()]):
        if _TENSORS in file.name:
            file.unlink(missing_ok=True)  # the others, which have it mapped as well, do the same


def mapped_by(processes: Iterable[int]) -> set[Path]:
    """Return the files in shared memory that processes have mapped and that have a name.

    The processes are given by their ids.
    """
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                # address permissions offset device inode path
                path = line.split(maxsplit=5)[5:]
                if path and path[0].startswith(f"{SHARED_MEMORY}/") and not path[0].endswith(" (deleted)"):
                    found.add(Path(path[0]))
    return found
