"""Where what a trace saved goes: the names of its blocks, in the scopes these stand in, and the caller's own containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from interpose import capture
from interpose.outcome import Delivered, update_in_place


class Delivery:
    """Puts a trace's values where its blocks would have left them.

    Args:
        block: the trace's own block.
        scope: where it stands.
        places: block and scope of each invoke.
        captured: the caller's objects by their index in the trace's scope.
    """

    def __init__(
        self,
        block: capture.Block,
        scope: capture.Scope,
        places: Sequence[tuple[capture.Block, capture.Scope]],
        captured: Mapping[int, object],
    ) -> None:
        self._block = block
        self._scope = scope
        self._places = list(places)
        self.captured = captured

    def deliver(self, values: Iterable[Delivered]) -> None:
        """Give contents to the caller's objects and values to its names."""
        for invoke, names, updates in values:
            for index, contents in updates.items():
                update_in_place(self.captured.get(index), contents)
            self.scope_of(invoke).assign(names)

    def scope_of(self, invoke: int) -> capture.Scope:
        """Return the scope that an invoke's names are assigned in: the caller's, unless a function of its own added it."""
        if invoke < 0 or invoke >= len(self._places):
            return self._scope
        inner, inner_scope = self._places[invoke]
        block = self._block
        first, last = block.first_line, max(statement.end_lineno or 0 for statement in block.body)
        inside = inner.filename == block.filename and first <= inner.first_line <= last
        return self._scope if inside else inner_scope
