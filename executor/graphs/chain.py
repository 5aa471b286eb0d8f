"""A pass of the model captured as a chain of graphs, with breaks between them.

All graphs of a chain are in one pool, and are captured on one stream in the order in which they are replayed. So memory that one
segment has freed may be used by a later segment, and what a later segment needs is alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from executor.graphs.capture import Recorder
from executor.graphs.segments import Break, Breaks, same_rows
from executor.model.hooks import Hooks, Spot
from executor.model.node import Node
from executor.model.tree import ModuleTree


class Chain:
    """A captured pass, which every step begins anew.

    Args:
        breaks: where it was to be broken.

    Attributes:
        spots: its breaks.
        graphs, at: the segments, and the breaks between them.
    """

    def __init__(self, breaks: Breaks) -> None:
        self.spots: frozenset[Spot] = breaks.spots
        self.graphs: list[Any] = []
        self.at: list[Break] = []
        self._next = 0

    def begin(self) -> Chain:
        """Begin at the first segment."""
        self._next = 0
        return self

    def go_on(self) -> Break | None:
        """Replay the next segment; return the break where it ends, None at the end of the pass."""
        number = self._next
        self._next = number + 1
        self.graphs[number].replay()
        return self.at[number] if number < len(self.at) else None

    def give_up(self) -> None:
        """End the pass where it is: the next step begins anew."""

    @contextmanager
    def compared(self, tree: ModuleTree, used: int) -> Iterator[list[bool]]:
        """Return a context that compares an eager pass with what the last replay kept.

        Args:
            tree: the model's modules.
            used: the rows of the batch that belong to requests.

        Returns:
            Whether the values are equal, at each break, when the pass is over.
        """
        found = [False] * len(self.at)
        coming = iter(range(len(self.at)))

        def compare(node: Node, kind: str, value: Any) -> Any:
            if kind not in node.computed:
                number = next(coming, None)
                if number is not None:
                    at = self.at[number]
                    found[number] = (node.path, kind) == at.spot and same_rows(at.before, value, at.rows, used)
            return value

        hooks = Hooks(tree, compare)
        for spot in self.spots:
            hooks.add(*spot)
        try:
            yield found
        finally:
            hooks.clear()


class Segmented:
    """A recorder that begins another graph at each break.

    Args:
        recorder: of the graphs.
        tree: the model's modules.
        breaks: where the pass is broken.
        rows: the rows of the batch's tensors.
    """

    def __init__(self, recorder: Recorder, tree: ModuleTree, breaks: Breaks, rows: int) -> None:
        self._recorder = recorder
        self._tree = tree
        self._breaks = breaks
        self._rows = rows
        self._chain = Chain(breaks)
        self._graph: Any = None
        self._here: list[tuple[Node, str, Any]] = []

    def free(self) -> int:
        return self._recorder.free()

    def on_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._recorder.on_stream()
        return context

    def wait(self) -> None:
        self._recorder.wait()

    def begin(self) -> Chain:
        self._graph = self._recorder.begin()
        return self._chain

    def end(self, chain: Chain) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            raise RuntimeError("no graph has begun")
        self._recorder.end(graph)
        chain.graphs.append(graph)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Return a context in which the model's modules break the pass."""
        hooks = Hooks(self._tree, self._come)
        for spot in self._breaks.spots:
            hooks.add(*spot)
        try:
            yield
        finally:
            hooks.clear()

    def _come(self, node: Node, kind: str, value: Any) -> Any:
        """End a graph where a hook is called, and begin the next."""
        if self._graph is None:  # the pass that warms up
            return value
        self._here.append((node, kind, value))
        if kind in node.computed:
            return value
        spot = (node.path, kind)
        at = Break.of(spot, self._here, spot in self._breaks.apart, self._rows)
        self._here = []
        self.end(self._chain)
        self._chain.at.append(at)
        self.begin()
        at.keep()
        return at.onward
