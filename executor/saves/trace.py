"""What encoding needs of a trace and of the bounds on its blocks, whoever has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from executor.saves.encoder import SaveRegistry
from executor.saves.reuse import Stayed

T = TypeVar("T")


class SavingTrace(Protocol):
    """A trace whose values are saved.

    Attributes:
        id: the trace's.
        session: the session actor's name, "" for none.
        expected: how many invokes it has.
        remote: whether its tensors stay on the server.
        blame: the id of the client's trace, as the bounds take it.
        registry: its saved values.
        stayed: the tensors of earlier traces that it uses.
        saved_bytes: encoded so far.
        streamed: captured containers, by index, whose changes the increments of an invoke carry.
    """

    id: str
    session: str
    expected: int
    remote: bool
    blame: bytes
    registry: SaveRegistry
    stayed: Stayed
    saved_bytes: int
    streamed: set[int]

    def captured(self) -> dict[int, int]:
        """Return the indices in the trace's scope of its captured lists, dicts and sets, by their id."""


class Bounds(Protocol):
    """Bounds the time of code that may run code of a block's objects.

    Attributes:
        step_seconds: wall time that it may take.
    """

    step_seconds: float

    def run(self, do: Callable[[], T], used: float, trace: bytes) -> tuple[T, float]:
        """Call `do` within the bounds; return what it returned and the seconds that it took.

        Raises:
            BudgetExceeded: it took longer.
        """
