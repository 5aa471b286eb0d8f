"""The end of a request: its edits and its block run to their ends, or are cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from executor.core.ended import Ended
from executor.interleave.machine.blocks import Block, Blocks
from executor.interleave.machine.events import Dropped, Generated, Preempted
from executor.interleave.machine.failures import EVICTED
from executor.interleave.machine.instructions import AwaitCache, Close, Finish, Forget
from executor.interleave.machine.turns import Doing, Turns
from executor.interleave.machine.votes import vote


class Endings:
    """Ends the requests of one worker.

    Args:
        blocks: the blocks that are here.
        turns: their turns.
        alone: whether there is one rank, which has nothing to compare.
    """

    def __init__(self, blocks: Blocks, turns: Turns, alone: bool) -> None:
        self._blocks = blocks
        self._turns = turns
        self._alone = alone

    def preempted(self, event: Preempted) -> Doing[None]:
        """Fail a request that is computed anew, unless that does it no harm."""
        block = self._blocks.all.get(event.request)
        if block is None or block.ended in (Ended.FAILED, Ended.STOPPED):  # such a request ends anyway
            return
        if not (yield from self._turns.disposable(block)):
            yield from self._turns.fail(block, EVICTED)

    def generated(self, event: Generated) -> Doing[None]:
        """Let the edits of a request and then its block run to their ends."""
        blocks, turns = self._blocks, self._turns
        refused = blocks.refused.pop(event.block, None) or blocks.joint_refused.pop(event.block, None)
        if refused is not None:
            turns.out.append(Close(event.block))
            return
        block = blocks.all[event.block]
        edits = blocks.edits_of(block.key)
        yield from self._settle_cache(block, edits)
        for edit in edits:
            if block.ended in (Ended.STOPPED, Ended.FAILED):
                turns.cancel(edit)
            yield from self._finish(edit)
        for edit in edits:
            turns.out.append(Forget(edit.key))
            blocks.remove(edit)
        blocks.remove(block)
        yield from self._finish(block)
        turns.out.append(Close(block.key))
        self._look_last(block.facts.trace)

    def _settle_cache(self, block: Block, edits: Sequence[Block]) -> Doing[None]:
        """Wait for what the device says of the cache, so that no request that spoilt it ends well."""
        if block.lost:  # on another rank the request may not be here
            return
        joint = self._blocks.joint.get(block.facts.trace, ())
        # Pipeline stages look at their caches at different times of a step. So one may have looked where another has not, and
        # several ranks vote in any case.
        some = [one for one in dict.fromkeys((*edits, block, *joint)) if one.looked_at or not self._alone]
        if some:
            found = yield AwaitCache(tuple(one.key for one in some))
            for one in some:
                one.looked_at = False
                one.spoilt |= one.key in found.blocks
            yield from vote(self._blocks, self._turns, some, self._alone)

    def _finish(self, block: Block) -> Doing[None]:
        if block.ended is None:  # on every rank: a rank that could not bind the block compares nothing
            yield from self._turns.turn(block, Finish(block.key))
            yield from self._turns.agree([block])

    def dropped(self, event: Dropped) -> Doing[None]:
        """Cancel all blocks of a trace."""
        blocks, turns = self._blocks, self._turns
        for block in blocks.of_trace(event.trace):
            for edit in blocks.edits_of(block.key):
                turns.cancel(edit)
                turns.out.append(Forget(edit.key))
                blocks.remove(edit)
            turns.cancel(block)
            turns.out.append(Forget(block.key))
            blocks.remove(block)
        for refused in (blocks.refused, blocks.joint_refused):
            for key in [key for key, trace in refused.items() if trace == event.trace]:
                del refused[key]
        self._look_last(event.trace)
        return
        yield  # a generator, as the others

    def _look_last(self, trace: str) -> None:
        if not self._blocks.of_trace(trace):
            self._turns.barriers.forget(trace)
