"""Tells the replica for which traces a worker was ended.

The engine's own process writes, the replica reads. The engine's process learns it from a watchdog (`executor.block.watchdog`)
and ends; the replica then fails these traces with a reason and all others with a retryable error. The memory between the two
has no name and ends with the replica.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

_VARIABLE = "INTERPOSE_ENGINE_VERDICTS"
_MOST_BYTES = 1 << 16


class Verdicts:
    """The replica's side.

    It is made before the engine's process starts, which inherits the address to write to.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("interpose-verdicts")
        os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{self._memory}"

    def guilty(self, trace_id: str) -> bool:
        """Whether a worker was ended because a block of this trace held it."""
        return trace_id.encode() in os.pread(self._memory, _MOST_BYTES, 0).split(b"\n")

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def report(trace_ids: Collection[str]) -> None:
    """Tell the replica for which traces workers were ended; nothing happens where there is none."""
    path = os.environ.get(_VARIABLE)
    if path and trace_ids:
        with contextlib.suppress(OSError), open(path, "ab") as memory:
            memory.write("".join(f"{trace_id}\n" for trace_id in trace_ids).encode())
