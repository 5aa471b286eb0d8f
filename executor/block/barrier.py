"""Barriers: invokes of a trace wait for each other in the middle of a step, and go on together from there.

A block that comes to a barrier parks. When as many have come as the barrier counts, they go on in the order in which they
came, from the place of the model where the last one was: what that place holds of their rows is still theirs to read and
change. Blocks that could wait for ever, because too few are left that might come, get an error at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from executor.block.identity import Identity
from executor.core.errors import Refusal
from interpose.v1 import trace_pb2 as pb

_MOST_PASSES = 1000  # of one barrier in one step


class Waiting(Protocol):
    """A block as a barrier knows it.

    Attributes:
        identity: which block it is.
        steps: how many steps of its request have begun.
        live: whether it waits for something.
    """

    @property
    def identity(self) -> Identity: ...
    @property
    def steps(self) -> int: ...
    @property
    def live(self) -> bool: ...


@dataclass(eq=False)
class Barrier:
    """One barrier of a trace, inside its blocks: `barrier()`.

    Attributes:
        number: its place among the trace's barriers.
        count: how many blocks go on together.
        waiting: the blocks that are there, in the order of arrival.
        broken: why no block can pass it any more, "" as long as that is possible.
    """

    number: int
    count: int
    _wait: Callable[[Barrier], None] = field(repr=False)
    waiting: list[Waiting] = field(default_factory=list)
    broken: str = ""
    _step: int = -1
    _passes: int = 0

    def __call__(self) -> None:
        """Wait until `count` blocks are here."""
        self._wait(self)

    def __str__(self) -> str:
        return f"barrier {self.number + 1} (of {self.count})"

    def complete(self) -> list[Waiting]:
        """Return those who can go on; [] as long as too few are here."""
        return self.waiting[: self.count] if len(self.waiting) >= self.count else []

    def check_group(self, group: Sequence[Waiting], present: Iterable[str]) -> None:
        """Break if a complete group cannot go on together.

        Args:
            group: those who have come.
            present: the requests that are in this step.
        """
        absent = [one for one in group if one.identity.request_id not in present]
        step = group[0].steps
        self._passes = self._passes + 1 if step == self._step else 1
        self._step = step
        if absent:
            invokes = ", ".join(str(one.identity.invoke) for one in absent)
            self.broken = f"the generation of invoke {invokes} had ended when the others came to {self}"
        elif any(one.steps != step for one in group):
            self.broken = f"the invokes came to {self} in different steps of their generations"
        elif self._passes > _MOST_PASSES:
            self.broken = f"{self} was passed {_MOST_PASSES} times in one step"

    def check_deserted(self, companions: Iterable[Waiting]) -> None:
        """Break if those who wait would wait for ever.

        Args:
            companions: the trace's blocks that start together and have not left.
        """
        coming = sum(one.live and one not in self.waiting for one in companions)
        if self.waiting and len(self.waiting) + coming < self.count:
            self.broken = (
                f"{len(self.waiting)} waited at {self} and {coming} more could come: the other invokes have ended without it. "
                "Call it in every block that it counts, or make it with a smaller number"
            )

    def refusal(self) -> Refusal:
        """Why nobody passes it any more; each block gets an error of its own."""
        return _refuse(self.broken)

    def ended(self) -> Refusal:
        """Why a block does not wait any longer whose generation is over."""
        return _refuse(
            f"the generation ended while the block waited at {self}: it counts {self.count} blocks, and they did not all come"
        )

    def too_late(self) -> Refusal:
        """Why a block cannot wait whose generation is over."""
        return _refuse(f"the generation had ended when the block came to {self}; call it before tracer.result")


def _refuse(message: str) -> Refusal:
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location="barrier()")
