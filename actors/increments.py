"""Holds the increments of a streamed trace until their output comes.

Increments come from the workers, outputs from the engine. Each invoke's increments are numbered. An increment is held until
the output with the tokens of its step comes. It goes on before that output, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from interpose.v1 import trace_pb2 as pb


class Arrived(NamedTuple):
    """An increment that has come from a worker.

    Attributes:
        increment: the increment.
        event: the serialized event that it came in.
    """

    increment: pb.Increment
    event: bytes


@dataclass
class _Invoke:
    """The increments and outputs of one invoke so far."""

    waiting: dict[int, Arrived] = field(default_factory=dict)  # by sequence
    next: int = 0
    tokens: int = 0
    steps: int = 0  # steps of the increments that have gone on
    over: bool = False  # no further increment comes before the request has ended


class Increments:
    """The increments of one trace that wait for their output."""

    def __init__(self) -> None:
        self._invokes: dict[int, _Invoke] = {}

    def add(self, arrived: Arrived) -> None:
        """Note an increment that has come from a worker."""
        self._of(arrived.increment.invoke).waiting[arrived.increment.sequence] = arrived

    def generated(self, output: pb.Output) -> None:
        """Note an output that has come from the engine."""
        self._of(output.invoke).tokens += len(output.token_ids)

    def complete(self, invoke: int) -> bool:
        """Whether all increments of the tokens generated so far have come."""
        state = self._of(invoke)
        if state.over or state.steps >= state.tokens:
            return True
        return any(one.last or one.steps >= state.tokens for one, _ in self._ready(state))

    def complete_before(self, increment: pb.Increment) -> bool:
        """Whether all increments before this increment have come."""
        state = self._of(increment.invoke)
        return all(number in state.waiting for number in range(state.next, increment.sequence))

    def take(self, invoke: int) -> list[Arrived]:
        """Remove and return the increments of the tokens generated so far."""
        state = self._of(invoke)
        taken = [one for one in self._ready(state) if one.increment.steps <= state.tokens]
        self._took(state, taken)
        return taken

    def take_all(self, invoke: int) -> list[Arrived]:
        """Remove and return all increments of an invoke."""
        state = self._of(invoke)
        taken = self._ready(state)
        self._took(state, taken)
        return taken

    def _of(self, invoke: int) -> _Invoke:
        return self._invokes.setdefault(invoke, _Invoke())

    @staticmethod
    def _ready(state: _Invoke) -> list[Arrived]:
        ready: list[Arrived] = []
        while state.next + len(ready) in state.waiting:
            ready.append(state.waiting[state.next + len(ready)])
        return ready

    @staticmethod
    def _took(state: _Invoke, taken: list[Arrived]) -> None:
        for increment, _ in taken:
            del state.waiting[increment.sequence]
            state.over = state.over or increment.last
            state.steps = max(state.steps, increment.steps)
        state.next += len(taken)
