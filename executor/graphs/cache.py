"""The captured graphs that are kept: the last used, within a number and measured bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from executor.graphs.segments import Breaks
from executor.graphs.tickets import Done, Ticket


@dataclass(frozen=True)
class Key:
    """What a graph is captured for.

    Attributes:
        descriptor: the sizes of the batch, as the engine describes them.
        sites: the sites whose taps it runs.
        plans: the programs that it has between its modules, by their keys.
        breaks: where it is broken for blocks; None: it is one graph.
    """

    descriptor: Hashable
    sites: frozenset[int] = frozenset()
    plans: frozenset[str] = frozenset()
    breaks: Breaks | None = None

    def serves(self, other: Key) -> bool:
        """Return whether a graph for this serves what another is for.

        A graph in segments writes for the tables only if it has sites.
        """
        if (self.descriptor, self.plans) != (other.descriptor, other.plans) or not self.sites >= other.sites:
            return False
        if self.breaks is None or other.breaks is None:
            return self.breaks is other.breaks
        return self.breaks >= other.breaks and bool(self.sites) == bool(other.sites)

    @property
    def width(self) -> tuple[int, int]:
        """The number of breaks and of sites."""
        return (0 if self.breaks is None else len(self.breaks.spots)), len(self.sites)


@dataclass(eq=False)
class Entry:
    """A captured graph.

    Attributes:
        key: what it is for.
        graph: the device's graph.
        size: its measured bytes.
        checked: whether a step of it was compared with hooks.
        last: of a graph that was dropped, its last replay.
    """

    key: Key
    graph: Any
    size: int
    checked: bool = False
    last: Ticket = field(default_factory=Done)


class GraphCache:
    """The graphs of one worker, least recently used first.

    A graph that is dropped is kept until its last replay is over, because the device may still run it.

    Args:
        most: the most graphs.
        most_bytes: their most bytes.
        now: returns a ticket for all work that the device was given.
    """

    def __init__(self, most: int, most_bytes: int, now: Callable[[], Ticket] = Done) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._now = now
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._leaving: list[Entry] = []
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """The bytes of all graphs, with the graphs that wait to be freed."""
        return sum(entry.size for entry in (*self._entries.values(), *self._leaving))

    def find(self, key: Key) -> Entry | None:
        """Return the graph with the fewest breaks and sites that serves a step; it counts as used.

        A graph serves a step if it is for the same batch and plans, runs the taps of all of the step's sites, and has all of
        the step's breaks.
        """
        found = self._entries.get(key)
        if found is None:
            serving = (entry for other, entry in self._entries.items() if other.serves(key))
            found = min(serving, key=lambda entry: entry.key.width, default=None)
        if found is not None:
            self._entries.move_to_end(found.key)
        return found

    def add(self, key: Key, graph: Any, size: int) -> Entry | None:
        """Keep a graph, and drop the graphs that were used longest ago until the bounds hold.

        Returns:
            The entry; None if the graph is larger than all graphs together may be. It is not kept then.
        """
        if size > self._most_bytes or self._most < 1:
            return None
        if key in self._entries:
            self.drop(self._entries[key])
        entry = self._entries[key] = Entry(key, graph, size)
        while len(self._entries) > self._most or sum(one.size for one in self._entries.values()) > self._most_bytes:
            self.drop(next(iter(self._entries.values())))
            self.evicted += 1
        self.reap()
        return entry

    def drop(self, entry: Entry) -> None:
        """Take a graph out; it is freed by `reap` when its last replay is over."""
        del self._entries[entry.key]
        entry.last = self._now()
        self._leaving.append(entry)

    def forget(self, plan: str) -> None:
        """Take out the graphs with a program that is gone, by its key."""
        for entry in [one for key, one in self._entries.items() if plan in key.plans]:
            self.drop(entry)

    def clear(self) -> None:
        """Take all graphs out, because weights or adapters were loaded anew into their memory."""
        for entry in list(self._entries.values()):
            self.drop(entry)

    def reap(self) -> None:
        """Free the dropped graphs whose last replay is over."""
        self._leaving = [entry for entry in self._leaving if not entry.last.done()]
