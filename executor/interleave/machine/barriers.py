"""Barriers: when waiting blocks go on together, and when no block will pass any more.

When as many blocks have come as a barrier counts, they go on in the order in which they came. Blocks that could wait for ever,
because too few are left that might come, get an error at once. The barriers of a trace are looked at only after all ranks have
agreed where its blocks are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from executor.interleave.machine.blocks import Block
from executor.interleave.machine.events import AtBarrier

MOST_PASSES = 1000  # of one barrier in one step


@dataclass(slots=True, eq=False)
class Barrier:
    """One barrier of a trace.

    Attributes:
        at: its index and its count.
        waiting: the blocks that are there, in the order of arrival.
        broken: why no block can pass the barrier any more, "" as long as blocks can.
        step, passes: a step, and how often the barrier was complete in it.
    """

    at: AtBarrier
    waiting: list[Block] = field(default_factory=list)
    broken: str = ""
    step: int = -1
    passes: int = 0

    def check_group(self, group: Sequence[Block], present: Collection[str]) -> None:
        """Break if a complete group cannot go on together.

        Args:
            group: the blocks that have come.
            present: the keys of the blocks in this step.
        """
        absent = [block for block in group if block.key not in present]
        step = group[0].step
        self.passes = self.passes + 1 if step == self.step else 1
        self.step = step
        if absent:
            invokes = ", ".join(str(block.facts.invoke) for block in absent)
            self.broken = f"the generation of invoke {invokes} had ended when the others came to {self.at}"
        elif any(block.step != step for block in group):
            self.broken = f"the invokes came to {self.at} in different steps of their generations"
        elif self.passes > MOST_PASSES:
            self.broken = f"{self.at} was passed {MOST_PASSES} times in one step"

    def check_deserted(self, gang: Iterable[Block]) -> None:
        """Break if the waiting blocks would wait for ever.

        Args:
            gang: the trace's blocks that start together and have not left.
        """
        waiting = len(self.waiting)
        coming = sum(block.ended is None and block not in self.waiting for block in gang)
        if waiting and waiting + coming < self.at.count:
            self.broken = (
                f"{waiting} waited at {self.at} and {coming} more could come: the other invokes have ended without it. "
                "Call it in every block that it counts, or make it with a smaller number"
            )


class Barriers:
    """The barriers that the blocks of a worker wait at."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, Barrier]] = {}  # by trace id and index

    def __bool__(self) -> bool:
        return bool(self._of)

    def come(self, block: Block, at: AtBarrier) -> None:
        """A block has come to a barrier."""
        barriers = self._of.setdefault(block.facts.trace, {})
        barriers.setdefault(at.number, Barrier(at)).waiting.append(block)

    def leave(self, block: Block, at: AtBarrier) -> None:
        """A block waits at a barrier no longer."""
        barrier = self._of.get(block.facts.trace, {}).get(at.number)
        if barrier is not None and block in barrier.waiting:
            barrier.waiting.remove(block)

    def forget(self, trace: str) -> None:
        """All blocks of a trace have left."""
        self._of.pop(trace, None)

    def decided(self, trace: str, gang: list[Block], present: Collection[str]) -> list[tuple[Barrier, list[Block]]]:
        """Return a trace's barriers that are complete or broken, with the blocks that go on there.

        Args:
            trace: the trace.
            gang: the trace's blocks that start together and have not left.
            present: the keys of the blocks in this step.
        """
        found = []
        for _, barrier in sorted(self._of.get(trace, {}).items()):
            if not barrier.waiting:
                continue
            group = barrier.waiting[: barrier.at.count] if len(barrier.waiting) >= barrier.at.count else []
            if group:
                barrier.check_group(group, present)
            else:
                barrier.check_deserted(gang)
            going = list(barrier.waiting) if barrier.broken else group
            if going:
                found.append((barrier, going))
        return found
