"""Rounds of turns: blocks run, ranks compare, calls are answered, barriers open.

Between the turns of a round nothing changes but the blocks that had them. What follows from a turn (a request that fails with its
edit, a barrier that opens) waits until the ranks have compared, so every rank does the same in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from executor.core.ended import Ended
from executor.core.location import Location
from executor.interleave.machine.barriers import Barriers
from executor.interleave.machine.blocks import Block, Blocks
from executor.interleave.machine.events import Failure, TurnEnded
from executor.interleave.machine.failures import broken, divergence
from executor.interleave.machine.instructions import (
    Apply,
    Break,
    Cancel,
    Compare,
    Fail,
    FailForEdit,
    FindChanged,
    Hook,
    Instruction,
    Overrun,
    Pass,
    Report,
    Settle,
    Stream,
    Throw,
    Turn,
    Withdraw,
)

T = TypeVar("T")
# Yields instructions that have an answer, and is sent the answers.
Doing = Generator[Instruction, Any, T]

BETWEEN = 1 << 62  # the model's position between two steps


class Turns:
    """The turns of one worker's blocks.

    Args:
        blocks: the blocks that are here.
        alone: whether there is one rank, which has nothing to compare.

    Attributes:
        out: the instructions that have not been handed out.
        barriers: the barriers that blocks wait at.
        waiting: the blocks that wait for a location of the step that runs, by path and kind.
        batch: the keys of the blocks in the last step that began, without joint blocks.
        position: the model's position in the step.
        visiting: whether the model is at a location.
    """

    def __init__(self, blocks: Blocks, alone: bool) -> None:
        self.out: list[Instruction] = []
        self.barriers = Barriers()
        self.waiting: dict[tuple[str, str], list[Block]] = {}
        self.batch: Collection[str] = ()
        self.position = BETWEEN
        self.visiting = False
        self._blocks = blocks
        self._alone = alone
        self._broken_off: list[Block] = []

    def turn(self, block: Block, instruction: Turn) -> Doing[None]:
        """Let a block run once; if its change at a location did not fit, it gets an error."""
        turned = yield instruction
        self._note(block, turned)
        if turned.misfit is not None:
            yield from self._misfit(block, turned.misfit)

    def turn_each(
        self, blocks: Sequence[Block], one: Callable[[str], Turn], several: Callable[[tuple[str, ...]], Instruction]
    ) -> Doing[None]:
        """Let blocks run once each.

        Neighbours that have nothing in common with other blocks get one instruction.

        Args:
            blocks: the blocks in the order of their turns.
            one: makes the instruction for a block.
            several: makes the instruction for several blocks.
        """
        for group in _neighbours(blocks):
            if len(group) == 1:
                yield from self.turn(group[0], one(group[0].key))
                continue
            ended = yield several(tuple([block.key for block in group]))
            for block, turned in zip(group, ended.turns, strict=True):
                self._note(block, turned)
            for block, turned in zip(group, ended.turns, strict=True):
                if turned.misfit is not None:
                    yield from self._misfit(block, turned.misfit)

    def _note(self, block: Block, turned: TurnEnded) -> None:
        if block.barrier is not None:
            self.barriers.leave(block, block.barrier)
        block.note(turned)
        if block.barrier is not None:
            self.barriers.come(block, block.barrier)

    def settle(self, block: Block, leaving: bool = False) -> Doing[None]:
        """Write back what a block changed at the location where the model is."""
        settled = yield Settle(block.key, leaving)
        if settled.misfit is not None:
            yield from self._misfit(block, settled.misfit)

    def _misfit(self, block: Block, why: Failure) -> Doing[None]:
        if block.ended is None:
            yield from self.turn(block, Throw(block.key, why))
        elif not block.failed:
            self._break_off(block, why)

    def agree(self, blocks: Sequence[Block]) -> Doing[None]:
        """Compare how turns ended; then let blocks wait for what they ask for, and barriers open.

        Args:
            blocks: the blocks that had a turn; the same on every rank.
        """
        while blocks:
            yield from self._compare(blocks)
            for block in blocks:
                if block in self._broken_off:
                    self._broken_off.remove(block)
                    yield from self._failed(block)
                else:
                    yield from self.follow(block)
            blocks = (yield from self._open_barriers(blocks)) if self.barriers else ()

    def _compare(self, blocks: Sequence[Block]) -> Doing[None]:
        """Compare how turns ended, and answer the blocks that call a module until no block does."""
        while blocks:
            if self._alone:
                calls = [(block, block.overdue) for block in blocks if block.calls]
            else:
                calls = yield from self._compared(blocks)
            for block, overran in calls:
                yield from self.turn(block, Overrun(block.key) if overran else Apply(block.key))
            blocks = [block for block, _ in calls]

    def _compared(self, blocks: Sequence[Block]) -> Doing[list[tuple[Block, bool]]]:
        """Compare over the ranks; return the blocks that call, and if they are overdue anywhere."""
        compared = yield Compare(tuple(block.key for block in blocks))
        calls = []
        for i, block in enumerate(blocks):
            if len({votes[i] for votes in compared.votes}) > 1:
                if not block.failed:
                    self._break_off(block, divergence(block.waits or block.calls, len(compared.votes)))
            elif block.calls:
                calls.append((block, any(votes[len(blocks) + i] for votes in compared.votes)))
            elif block.away and len({votes[2 * len(blocks) + i] for votes in compared.votes}) > 1:
                self.out.append(Withdraw(block.key))
                block.away = False
        return calls

    def _open_barriers(self, blocks: Sequence[Block]) -> Doing[list[Block]]:
        """Let blocks go on at barriers that are complete, or never will be; return these blocks.

        Args:
            blocks: the blocks that had a turn, and may have come to a barrier or ended.
        """
        going: list[tuple[Block, Failure | None]] = []
        for trace in sorted({block.facts.trace for block in blocks if block.facts.gang}):
            for barrier, group in self.barriers.decided(trace, self._blocks.gang_of(trace), self.batch):
                error = broken(barrier.broken) if barrier.broken else None
                if error is not None:
                    self.out.append(Break(trace, barrier.at.number, error.message))
                going += [(block, error) for block in group]
        for block, error in going:
            yield from self.turn(block, Pass(block.key, self.position, error))
        if self.visiting:  # after all have gone on: what a block was served may be in use by the others until then
            for block, _ in going:
                if block.barrier is None and not block.calls:
                    yield from self.settle(block)
        return [block for block, _ in going]

    # What follows when the ranks have agreed.

    def follow(self, block: Block) -> Doing[None]:
        """Have a block wait for what it asks for; if it has ended, its request may end too."""
        facts, ended, location = block.facts, block.ended, block.here
        if ended is None and location is not None and not block.away:  # what most turns end with
            self._wait(block, location)
            return
        if ended is Ended.FAILED and facts.owner:
            yield from self._fail_for_edit(block)
        elif ended in (Ended.FAILED, Ended.STOPPED) and not facts.owner and not facts.joint:
            if ended is Ended.FAILED:  # by itself or not: on another rank it may be the other way round
                for edit in self._blocks.edits_of(block.key):
                    self.cancel(edit)
            self._report(block, ended)
        if block.resting:
            if ended not in (None, Ended.DONE) or not (block.owes or block.records):
                self._blocks.live.pop(block.key, None)
            for owner in self._blocks.owners_of(block):
                if owner.reported is None and (yield from self.disposable(owner)):
                    self._report(owner, Ended.READ_ONLY)
            return
        if block.away:
            self._blocks.live.pop(block.key, None)

    def _wait(self, block: Block, location: Location) -> None:
        key = (location.path, str(location.kind))
        waiting = self.waiting.get(key)
        if waiting is None:
            self.waiting[key] = [block]
            self.out.append(Hook(*key))
        else:
            waiting.append(block)

    def _report(self, block: Block, ended: Ended) -> None:
        if block.reported is not ended:
            block.reported = ended
            self.out.append(Report(block.key, ended))

    def disposable(self, block: Block) -> Doing[bool]:
        """Return whether a request could be computed anew without harm.

        That is so if its blocks need no step more and changed nothing.
        """
        if block.ended not in (None, Ended.DONE) or self._blocks.waits(block.key):
            return False
        beside = (*self._blocks.edits_of(block.key), *self._blocks.joint.get(block.facts.trace, ()))
        changed = yield FindChanged((block.key, *(one.key for one in beside)))
        return not changed.blocks

    # Failures that are not a block's own.

    def fail(self, block: Block, failure: Any) -> Doing[None]:
        """End a block with a failure that is not its own, and what must end with it."""
        self._break_off(block, failure)
        self._broken_off.remove(block)
        yield from self._failed(block)

    def cancel(self, block: Block) -> None:
        """End a block without a result; a block that has ended stays as it is."""
        if block.ended is None:
            self.out.append(Cancel(block.key))
            self._end(block, Ended.CANCELLED)
            self._blocks.live.pop(block.key, None)

    def _break_off(self, block: Block, failure: Any) -> None:
        self.out.append(Fail(block.key, failure))
        self._end(block, Ended.FAILED)
        self._broken_off.append(block)

    def _end(self, block: Block, ended: Ended) -> None:
        if block.barrier is not None:
            self.barriers.leave(block, block.barrier)
        block.end(ended)

    def _fail_for_edit(self, edit: Block) -> Doing[None]:
        """A standing edit failed, and with it the request that it ran in."""
        owner = self._blocks.all.get(edit.facts.owner)
        if owner is not None and not owner.failed:
            self.out.append(FailForEdit(owner.key, edit.key))
            self._end(owner, Ended.FAILED)
            yield from self._failed(owner)

    def _failed(self, block: Block) -> Doing[None]:
        yield from self.follow(block)
        yield from self.stream(block)

    def stream(self, block: Block) -> Doing[None]:
        """Send what a block of a streamed trace saved in the step."""
        if block.facts.streamed and block.key in self._blocks.all:
            streamed = yield Stream(block.key, block.key not in self._blocks.live)
            if not streamed.sent:
                self._report(block, Ended.FAILED)


def _neighbours(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Yield blocks in their order.

    Neighbours that are apart from all other blocks are one list. Any other block is a list by itself.
    """
    for apart, group in groupby(blocks, lambda block: block.facts.apart):
        if apart:
            yield list(group)
        else:
            yield from ([block] for block in group)
