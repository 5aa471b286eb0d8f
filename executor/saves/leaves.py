"""The tensors and arrays in saved containers, found before the containers are encoded.

Tensors of one layout become one stack, in whichever containers they are. The tensors of a list are often the rows of one tensor
already: those of a loop's steps, or what `unbind` gives. Such a run is a stack without a copy and without a look at each tensor
for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from executor.model.items import ListOutputs, Outputs, plainly
from executor.saves.registry import SaveRegistry
from interpose.contract.cache import Cache, Visit
from interpose.wire.stacks import joined

_MAX_DEPTH = 100
_SHORTEST = 8  # tensors of a run; fewer are copied together in less time


@dataclass
class Run:
    """Tensors that are the rows of one tensor.

    Attributes:
        parts: the tensors in the order of the rows, as the items of one list or of several lists.
        rows: the tensor, [tensors, ...].
    """

    parts: list[Sequence[Any]]
    rows: torch.Tensor

    def add(self, members: Sequence[Any], rows: torch.Tensor, limit: int) -> bool:
        """Add tensors if they are the next rows; return whether they are.

        Args:
            members: the tensors.
            rows: the tensor [tensors, ...] that has them as its rows.
            limit: the bytes of a run.
        """
        mine, size = self.rows, self.rows.nbytes
        follows = mine.data_ptr() + size == rows.data_ptr() and size + rows.nbytes <= limit
        if not follows or mine.shape[1:] != rows.shape[1:] or mine.dtype != rows.dtype:
            return False
        try:
            with torch.no_grad():
                # It fails if the memory of the first rows ends before the last row.
                self.rows = mine.as_strided((len(mine) + len(rows), *mine.shape[1:]), mine.stride())
        except RuntimeError:
            return False
        self.parts.append(members)
        return True


@dataclass
class Leaves:
    """The tensors and arrays in containers, each once.

    Attributes:
        single: the tensors and arrays by identity, in their order, without those of the runs.
        runs: the tensors that are the rows of others.
    """

    single: dict[int, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def add_run(self, members: Sequence[Any], limit: int) -> bool:
        """Add tensors if they are the rows of one tensor; return whether they are.

        Args:
            members: plain tensors.
            limit: the bytes of a run.
        """
        rows = joined(members)
        if rows is None:
            return False
        start, stop = rows.data_ptr(), rows.data_ptr() + rows.nbytes
        for run in self.runs:
            first = run.rows.data_ptr()
            if first < stop and start < first + run.rows.nbytes:
                return False  # The tensors may be the same.
        if self.runs and self.runs[-1].add(members, rows, limit):
            return True
        step = max(2, limit // rows[0].nbytes)
        for at in range(0, len(members), step):
            self.runs.append(Run([members[at : at + step]], rows[at : at + step]))
        return True


def leaves(values: Iterable[Any], registry: SaveRegistry, *, run_bytes: int = 0) -> Leaves:
    """Return the tensors and arrays in containers.

    A tensor that is itself one of `values` is left out.

    Args:
        values: the values of one message.
        registry: says what a value is sent as.
        run_bytes: the most bytes of a run; 0: no runs are looked for.
    """
    values = registry.snapshots(list(values))
    search, found = _Search(registry, run_bytes), Leaves()
    for value in values:
        search.look(value, 0)
    named = {id(value) for value in values if isinstance(value, torch.Tensor)}
    for run in search.found.runs:
        if not named or all(named.isdisjoint(map(id, part)) for part in run.parts):
            found.runs.append(run)
        else:
            found.single.update((id(one), one) for part in run.parts for one in part)
    found.single.update(search.found.single)
    for key in named:
        found.single.pop(key, None)
    return found


class _Search:
    """A search for tensors and arrays in containers.

    Args:
        registry, run_bytes: as of `leaves`.

    Attributes:
        found: what was found.
    """

    def __init__(self, registry: SaveRegistry, run_bytes: int) -> None:
        self.found = Leaves()
        self._registry = registry
        self._run_bytes = run_bytes
        self._seen: set[int] = set()

    def look(self, value: Any, depth: int) -> None:
        """Look at a value, which is that many containers deep."""
        inner = _inner(value)
        if inner is None or depth > _MAX_DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        tensor, array, single = torch.Tensor, numpy.ndarray, self.found.single
        items = self._registry.snapshots(list(inner))
        if set(map(type, items)) == {tensor}:
            items = self._without_run(items)
            single.update(zip(map(id, items), items, strict=True))
            return
        for item in items:
            kind = type(item)
            if kind is tensor or kind is array:
                single[id(item)] = item
            else:
                self.look(item, depth + 1)

    def _without_run(self, items: Sequence[Any]) -> Sequence[Any]:
        """Note the run at the end of a list; return the tensors that are in none.

        It begins with the first or the second tensor.
        """
        if not self._run_bytes or len(items) < _SHORTEST:
            return items
        for at in (0, 1):  # The first tensor is often that of a prompt, which has more rows.
            if self.found.add_run(items[at:], self._run_bytes):
                return items[:at]
        return items


def _inner(value: Any) -> Iterable[Any] | None:
    """Return the items of a container, or None for a value of another kind."""
    kind = type(value)
    if kind is list or kind is tuple:
        items: Iterable[Any] = value
        return items
    if kind is dict or kind is OrderedDict:
        items = value.values()
        return items
    if kind is Cache or kind is Visit:
        return vars(value).values()
    return plainly(value) if isinstance(value, Outputs | ListOutputs) else None
