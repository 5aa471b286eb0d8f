"""What the ranks say of the cache and of what blocks wrote, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

from executor.interleave.machine.blocks import Block, Blocks
from executor.interleave.machine.failures import different_values, not_finite
from executor.interleave.machine.instructions import CompareWritten
from executor.interleave.machine.turns import Doing, Turns


def vote(blocks: Blocks, turns: Turns, some: Sequence[Block], alone: bool) -> Doing[None]:
    """Fail the blocks that spoilt the cache, and the blocks that wrote other values elsewhere.

    A block fails if it spoilt the cache on any rank. The ranks may learn at different times that the cache is spoilt. So each
    rank says what it knows.

    Args:
        blocks: the blocks of the worker.
        turns: their turns.
        some: the blocks that are voted on, the same on every rank.
        alone: whether there is one rank, which has nothing to compare.
    """
    spoilt, count = tuple(int(block.spoilt) for block in some), len(some)
    for block in some:
        block.spoilt = False
    votes = [(*spoilt, *(0,) * count)]
    if some and not alone:
        votes = (yield CompareWritten(tuple(block.key for block in some), spoilt)).votes
    for i, block in enumerate(some):
        if any(numbers[i] for numbers in votes):
            failure = not_finite(block.step)
        elif len({numbers[count + i] for numbers in votes}) > 1:
            failure = different_values(block.step, len(votes))
        else:
            continue
        # A joint block has changed the rows that its gang goes on with.
        gang = blocks.gang_of(block.facts.trace) if block.facts.joint else []
        for one in (block, *gang):
            if not one.failed:  # a block's own failure says more
                yield from turns.fail(one, failure)
