"""Names that the blocks of one trace have together, as if all blocks lay in one function.

A name that is saved in the outer block is shared. Before a block runs, it sees the name's current value. The other blocks see the
value that the block then binds to the name. A gang exchanges further names. An invoke can read the names of an ended block.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy
import torch

from interpose.v1 import trace_pb2 as pb
from interpose.wire import arrays


class SharedNames:
    """The names that pass between the blocks of one trace.

    Args:
        trace: the trace.
        values: the values of the trace's shared names.

    Attributes:
        of_session: whether the trace shares objects that its session keeps.
    """

    def __init__(self, trace: pb.Trace, values: dict[str, Any]) -> None:
        self._shared = values
        self._at_start = dict(values)
        self._exchanges = list(trace.exchanged)
        self._exchanged: dict[str, Any] = {}
        self._exports: dict[int, dict[str, Any]] = {}
        entries = {variable.entry for variable in trace.variables}
        self.of_session = bool(entries)
        self._kept = {
            one.name for one in trace.shared if one.value.WhichOneof("kind") == "ref" and one.value.ref in entries
        }
        self._sums = {
            name: _checksum(value) for name, value in values.items() if isinstance(value, torch.Tensor | numpy.ndarray)
        }  # as they came

    def __bool__(self) -> bool:
        return bool(self._shared)

    def __contains__(self, name: str) -> bool:
        return name in self._shared

    def give(self, names: MutableMapping[str, Any], gang: bool) -> None:
        """Bind a block's names to the current values.

        Args:
            names: the block's.
            gang: whether the block is of a gang.
        """
        names.update(self._shared)
        if gang:
            names.update(self._exchanged)

    def take(self, names: MutableMapping[str, Any], gang: bool) -> None:
        """Take over what a block bound."""
        for name in self._shared:
            if name in names:
                self._shared[name] = names[name]
        if gang:
            self._exchanged.update({name: names[name] for name in self._exchanges if name in names})

    def export(self, invoke: int, names: MutableMapping[str, Any], writes: Iterable[str]) -> None:
        """Keep what an ended block bound, for invokes that read it."""
        self._exports[invoke] = {name: names[name] for name in writes if name in names}

    def exported(self, invoke: int) -> dict[str, Any]:
        """Return what an ended block bound; {} if it has not ended well."""
        return self._exports.get(invoke, {})

    def changed(self) -> dict[str, Any]:
        """Return the shared names that the trace gives back.

        A name counts that is bound to another object than at the start, to a tensor that was changed in place, or to an object
        that the session keeps.
        """
        return {name: value for name, value in self._shared.items() if name in self._kept or self._is_new(name)}

    def drop(self) -> None:
        """Drop every object; the caller bounds what their `__del__` does."""
        for names in (self._shared, self._at_start, self._exchanged, *self._exports.values()):
            names.clear()

    def _is_new(self, name: str) -> bool:
        value = self._shared[name]
        return value is not self._at_start[name] or (name in self._sums and self._sums[name] != _checksum(value))


def _checksum(value: Any) -> int:
    data = arrays.tensor_bytes(value) if isinstance(value, torch.Tensor) else arrays.ndarray_bytes(value)
    return zlib.crc32(data)
