"""A small table of results about code objects, keyed by identity; the oldest goes first."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """A bounded table from objects (with a further key) to values, for use from several threads.

    An entry keeps its object alive, so that no other object can come to have the same identity. Comparing code objects
    by value would be slow, and two of them can be equal and stand in different files.
    """

    def __init__(self, size: int):
        self._size = size
        self._entries: dict[tuple[int, Hashable], tuple[object, V]] = {}
        self._lock = threading.Lock()

    def get(self, owner: object, key: Hashable = None) -> V | None:
        """Returns the value kept for `owner` and `key`, or None."""
        entry = self._entries.get((id(owner), key))
        return entry[1] if entry is not None and entry[0] is owner else None

    def put(self, owner: object, value: V, key: Hashable = None) -> V:
        """Keeps `value` and returns it."""
        with self._lock:
            self._entries.pop((id(owner), key), None)
            while len(self._entries) >= self._size:
                del self._entries[next(iter(self._entries))]
            self._entries[id(owner), key] = (owner, value)
        return value
