"""The registry of saved values: which values a block saved, and what each is sent as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from executor.core.torch_modes import unseen
from executor.model.items import ListOutputs, Outputs
from executor.model.module_name import ModuleName
from executor.model.values import Served

_MAX_DEPTH = 100
_MAX_ITEMS = 1_000_000
CONTAINERS = (list, tuple, dict, set, frozenset)


class Search:
    """How many values a search may still look at."""

    def __init__(self, values: int) -> None:
        self._left = values

    def take(self, count: int) -> bool:
        """Return whether the search may look at `count` more values, and count them."""
        if count > self._left:
            return False
        self._left -= count
        return True


class SaveRegistry:
    """The saved values of one trace, by identity.

    A value that shares memory with what a block was served is copied when it is saved, because the model may still change it.
    `save` then returns an alias. A write to the alias still reaches the model; the copy stays as it was.

    Each alias keeps the copy of its own moment. The value itself keeps the latest copy: a name is still bound to the value
    after `h.save()` on a line of its own.

    Any other value belongs to the block. It comes back as it is when the trace ends, as a list that the block appends to.
    """

    def __init__(self) -> None:
        # The saved object itself is kept, so that its id is not used again.
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._copies: set[int] = set()
        self._replaced: dict[int, Any] = {}  # the snapshots of values that are sent as another object
        self._held: list[Served] = []

    def __len__(self) -> int:
        return len(self._saved)

    def clear(self) -> None:
        """Forget everything, because the trace has ended."""
        self._saved.clear()
        self._copies.clear()
        self._replaced.clear()
        self._held.clear()

    def hold(self, served: Served) -> None:
        """Note that a block may hand out values of its location, until `release`."""
        if served not in self._held:
            self._held.append(served)

    def release(self, served: Served) -> None:
        """Note that the block has left that location. A second call does nothing."""
        if served in self._held:
            self._held.remove(served)

    def save(self, value: Any, served: Served | None) -> Any:
        """Register a value; return the value with which the block goes on.

        Args:
            value: any object.
            served: the served value of the block's location, if the block is at a location.
        """
        if isinstance(value, torch.Tensor):
            at_hand = self._held if served is None else [served, *self._held]
            with unseen():
                owned = any(one.owns(value) for one in at_hand)
            if not owned:
                self.mark(value, value)
                return value
            alias, snapshot = value.view_as(value), value.detach().clone()
            self.mark(alias, snapshot)
            self.mark(value, snapshot)
            return alias
        if isinstance(value, Outputs | ListOutputs):
            saved = [self.save(item, served) for item in value]
            snapshots = [self.snapshot(item) for item in saved]
            listed = isinstance(value, ListOutputs)
            items, snapshot = (saved, snapshots) if listed else (tuple(saved), tuple(snapshots))
            self.mark(items, snapshot)
            self.mark(value, snapshot)
            return items
        self.mark(value, value)
        return value

    def mark(self, value: Any, snapshot: Any) -> None:
        """Register `value`, which is sent as `snapshot`."""
        self._saved[id(value)] = (value, snapshot)
        if snapshot is not value:
            self._copies.add(id(snapshot))
            self._replaced[id(value)] = snapshot
        else:
            self._replaced.pop(id(value), None)

    def mark_all(self, values: Sequence[Any]) -> None:
        """Register values that the block owns; each is sent as it is when the trace ends."""
        self._saved.update(zip(map(id, values), zip(values, values, strict=True), strict=True))
        for number in self._replaced.keys() & set(map(id, values)) if self._replaced else ():
            del self._replaced[number]

    def copied(self, value: Any) -> bool:
        """Return whether a value is a snapshot, which nothing changes any more."""
        return id(value) in self._copies

    def snapshot(self, value: Any) -> Any:
        """Return what a value is sent as: its snapshot, or the value itself."""
        entry = self._saved.get(id(value))
        return entry[1] if entry is not None and entry[0] is value else value

    def snapshots(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return what each of some values is sent as."""
        if self._replaced.keys().isdisjoint(map(id, values)):
            return values
        return list(map(self._replaced.get, map(id, values), values))

    def __contains__(self, value: object) -> bool:
        entry = self._saved.get(id(value))
        return entry is not None and entry[0] is value

    def reaches(self, value: Any, search: Search | None = None) -> bool:
        """Return whether a value is saved, or is a container with a saved value at any depth.

        Args:
            search: bounds how many values are looked at. None means no bound.
        """
        seen: set[int] = set()
        todo: list[tuple[Any, int]] = [(value, 0)]
        while todo:
            item, depth = todo.pop()
            if item in self:
                return True
            if not isinstance(item, CONTAINERS) or id(item) in seen or depth > _MAX_DEPTH or len(seen) > _MAX_ITEMS:
                continue
            seen.add(id(item))
            if search is not None and not search.take(len(item)):
                return False
            inner: Iterable[Any] = item.values() if isinstance(item, dict) else item
            if not self._saved.keys().isdisjoint(map(id, inner)):
                return True
            todo.extend((one, depth + 1) for one in inner if isinstance(one, CONTAINERS))
        return False


def refuse_names(value: Any) -> None:
    """Refuse a value to be saved that is or holds a name of the model in place of a value.

    Keys of dicts may be names. Modules may be too, if they were in a container that came from the notebook.

    Raises:
        Refusal: INVALID_ARGUMENT, with the place and what to write instead.
    """
    seen: set[int] = set()
    todo: list[Any] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, ModuleName):
            if item is value or not item.may_be_kept:
                raise item.misuse("saved", ".save()" if item is value else "")
        elif isinstance(item, CONTAINERS) and id(item) not in seen and len(seen) <= _MAX_ITEMS:
            seen.add(id(item))
            inner = item.values() if isinstance(item, dict) else item
            if not all(map(_plain, set(map(type, inner)))):
                todo.extend(inner)


def _plain(kind: type) -> bool:
    """Return whether values of a type are neither names of the model nor containers of any."""
    return not issubclass(kind, (ModuleName, *CONTAINERS))
