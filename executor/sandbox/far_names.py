"""Names of blocks that are in a sandboxed process, as the worker holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from executor.block.shared_names import SharedNames
from interpose.v1 import trace_pb2 as pb


class FarNames(dict[str, Any]):
    """The names of a block in a process: none is here.

    Args:
        block: the block's key.
        leave: has the process drop the block.

    Attributes:
        block: as given.
    """

    def __init__(self, block: str, leave: Callable[[FarNames, bool], None]) -> None:
        super().__init__()
        self.block = block
        self._leave = leave

    def clear(self) -> None:
        """Drop the names in the process."""
        self._leave(self, False)


class FarShared(SharedNames):
    """The names that pass between blocks in a process.

    Attributes:
        exports: the ended blocks whose names other invokes may read, and of which the process has not been told.
    """

    def __init__(self) -> None:
        super().__init__(pb.Trace(), {})
        self.exports: set[str] = set()

    def export(self, invoke: int, names: MutableMapping[str, Any], writes: Iterable[str]) -> None:
        assert isinstance(names, FarNames)
        self.exports.add(names.block)
