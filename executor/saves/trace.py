"""What encoding needs to know of a trace and of the bounds on its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from executor.saves.registry import SaveRegistry
from executor.saves.reuse import EarlierTensors

T = TypeVar("T")


class SavingTrace(Protocol):
    """A trace whose values are saved.

    Attributes:
        id: the trace's id.
        session: the session actor's name, or "" for none.
        expected: the number of invokes.
        remote: whether the trace's tensors stay on the server.
        stacks: whether the trace's client can read stacks.
        of_session: whether the trace shares objects that its session keeps.
        blame: the id of the client's trace, as `Bounds.run` takes it.
        registry: the saved values.
        earlier: the tensors of earlier traces that the trace uses.
        saved_bytes: the bytes encoded so far.
        streamed: captured containers, by index, whose changes the increments of an invoke carry.
    """

    id: str
    session: str
    expected: int
    remote: bool
    stacks: bool
    of_session: bool
    blame: bytes
    registry: SaveRegistry
    earlier: EarlierTensors
    saved_bytes: int
    streamed: set[int]

    def captured(self) -> dict[int, int]:
        """Return the indices of the trace's captured lists, dicts and sets, by their id.

        An index counts the objects of the trace's scope.
        """


class Bounds(Protocol):
    """Bounds the time of code that may run code of a block's objects.

    Attributes:
        step_seconds: the wall time that the code may take, in seconds.
    """

    step_seconds: float

    def run(self, do: Callable[[], T], used: float, trace: bytes) -> tuple[T, float]:
        """Call `do` within the bounds; return its result and the seconds that it took.

        Raises:
            BudgetExceeded: the call took longer.
        """
