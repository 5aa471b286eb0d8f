"""The increments of a streamed trace: they come from the workers, the outputs they belong to from the engine.

Each invoke's increments are numbered. They are held here until the output comes that tells of the tokens which their steps
gave, and go before it, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from interpose.v1 import trace_pb2 as pb


@dataclass
class _Invoke:
    """What one invoke's increments and outputs have come to."""

    waiting: dict[int, pb.Increment] = field(default_factory=dict)  # by sequence
    next: int = 0
    tokens: int = 0
    steps: int = 0  # of the increments that have gone on
    over: bool = False  # no increment comes before the request has ended


class Increments:
    """The increments of one trace that have come and have not gone on."""

    def __init__(self) -> None:
        self._invokes: dict[int, _Invoke] = {}

    def add(self, increment: pb.Increment) -> None:
        """One has come from a worker."""
        self._of(increment.invoke).waiting[increment.sequence] = increment

    def generated(self, output: pb.Output) -> None:
        """An output has come from the engine."""
        self._of(output.invoke).tokens += len(output.token_ids)

    def complete(self, invoke: int) -> bool:
        """Whether everything is here that belongs to the tokens generated so far."""
        state = self._of(invoke)
        if state.over or state.steps >= state.tokens:
            return True
        return any(one.last or one.steps >= state.tokens for one in self._ready(state))

    def complete_before(self, increment: pb.Increment) -> bool:
        """Whether everything is here that comes before an increment."""
        state = self._of(increment.invoke)
        return all(number in state.waiting for number in range(state.next, increment.sequence))

    def take(self, invoke: int) -> list[pb.Increment]:
        """Return what belongs to the tokens generated so far; it goes on now."""
        state = self._of(invoke)
        taken = [one for one in self._ready(state) if one.steps <= state.tokens]
        self._took(state, taken)
        return taken

    def take_all(self, invoke: int) -> list[pb.Increment]:
        """Return everything that is here; it goes on now."""
        state = self._of(invoke)
        taken = self._ready(state)
        self._took(state, taken)
        return taken

    def _of(self, invoke: int) -> _Invoke:
        return self._invokes.setdefault(invoke, _Invoke())

    @staticmethod
    def _ready(state: _Invoke) -> list[pb.Increment]:
        ready: list[pb.Increment] = []
        while state.next + len(ready) in state.waiting:
            ready.append(state.waiting[state.next + len(ready)])
        return ready

    @staticmethod
    def _took(state: _Invoke, taken: list[pb.Increment]) -> None:
        for increment in taken:
            del state.waiting[increment.sequence]
            state.over = state.over or increment.last
            state.steps = max(state.steps, increment.steps)
        state.next += len(taken)
