"""One step: blocks start, are served at locations, and learn of what has not come."""

from __future__ import annotations

from executor.core.ended import Ended
from executor.core.location import Kind
from executor.interleave.machine.blocks import Block, Blocks
from executor.interleave.machine.events import ModelRan, Reached, StartedEarly, StepBegan, StepEnded
from executor.interleave.machine.failures import (
    OUT_OF_STEP,
    no_room,
    not_reached,
    too_long,
)
from executor.interleave.machine.gang import Gangs
from executor.interleave.machine.instructions import (
    BeginStep,
    CheckCache,
    CheckSkips,
    Miss,
    Record,
    Resume,
    ResumeAll,
    See,
    Serve,
    ServeAll,
    Start,
    Throw,
)
from executor.interleave.machine.turns import BETWEEN, Doing, Turns
from executor.interleave.machine.votes import vote


class Steps:
    """The steps of one worker.

    Args:
        blocks: the blocks that are here.
        turns: their turns.
        alone: whether there is one rank, which has nothing to compare.
    """

    def __init__(self, blocks: Blocks, turns: Turns, alone: bool) -> None:
        self._blocks = blocks
        self._turns = turns
        self._alone = alone
        self._gangs = Gangs(blocks)
        self._in_step: list[Block] = []

    def _present(self) -> list[Block]:
        """Return the blocks of the step that have not left."""
        return [block for block in self._in_step if block.key in self._blocks.all]

    # Its beginning.

    def started_early(self, event: StartedEarly) -> Doing[None]:
        """Let blocks run before their first step; what a block waits for then, it gets in its steps."""
        for key in event.keys:
            block = self._blocks.live.get(key)
            if block is None or block.ended is not None:
                continue
            block.early = True
            yield from self._turns.turn(block, Start(key, block.facts.prompt_tokens))
            if block.away:
                self._blocks.live.pop(key)

    def began(self, event: StepBegan) -> Doing[None]:
        """Start the blocks whose first step begins, and resume the blocks that wait for the step."""
        turns, live, tokens = self._turns, self._blocks.live, event.tokens
        apart = self._gangs.apart(tokens)
        seeing = self._gangs.seeing(tokens)
        blocks = [live[key] for key in tokens if key in live] + [joint for joint, _ in seeing]
        self._in_step = blocks
        turns.batch = tokens
        turns.position = -1
        for block in blocks:
            block.step += 1
        turns.out.append(BeginStep(tuple(block.key for block in blocks)))
        seen = {joint.key: requests for joint, requests in seeing}
        turns.out += [See(key, requests) for key, requests in seen.items()]
        resumed: list[Block] = []
        for block in blocks:
            if block.key in seen and not self._gangs.keep_step(block, seen[block.key]):
                yield from turns.fail(block, OUT_OF_STEP)
            elif block.resting:  # it is here for a module that it skipped or values that it records
                yield from self._check_skips(block)
            elif block.step == 0 and not block.early:
                rows = sum(tokens[key] for key in seen[block.key]) if block.key in seen else tokens[block.key]
                yield from self._start(block, rows, block.facts.trace in apart)
            elif block.waits is not None and block.waits.kind == Kind.STEP and block.waits.step == block.step:
                if block.facts.apart:  # the order among these blocks and the others says nothing
                    resumed.append(block)
                else:
                    yield from turns.turn(block, Resume(block.key))
        yield from turns.turn_each(resumed, Resume, ResumeAll)
        yield from turns.agree(self._present())

    def _start(self, block: Block, tokens: int, apart: bool) -> Doing[None]:
        """Start a block.

        Args:
            block: the block.
            tokens: the number of rows that the block sees in the step.
            apart: whether the step lacks a request of the block's gang.
        """
        if tokens != block.facts.prompt_tokens and not block.facts.joint:
            yield from self._turns.fail(block, too_long(block.facts.prompt_tokens))
        elif apart:
            yield from self._turns.fail(block, no_room(block.facts.gang))
        else:
            yield from self._turns.turn(block, Start(block.key, tokens))

    # A location.

    def reached(self, event: Reached) -> Doing[None]:
        """Serve the blocks that wait for a location, in their order; then record it."""
        turns, key = self._turns, (event.path, event.kind)
        turns.position = event.position
        turns.visiting = True
        visited: list[Block] = []
        while True:
            waiting = turns.waiting.pop(key, None)
            if waiting is not None:  # also blocks that have come to wait for this very location after a barrier
                visited += waiting
                yield from self._serve([block for block in waiting if block.ended is None])
                continue
            leaving, visited = [block for block in visited if block.barrier is not None], []
            if not leaving:
                break
            for block in leaving:
                yield from turns.settle(block, leaving=True)
            yield from turns.agree(leaving)
        yield from self._record()
        turns.visiting = False

    def _serve(self, blocks: list[Block]) -> Doing[None]:
        turns = self._turns
        if len(blocks) > 1:
            blocks.sort(key=lambda block: block.order)
        # A block that sees the rows of others sees what these have made of them, and the other way round.
        overlapping = any(block.facts.joint for block in blocks)
        for group in [[block] for block in blocks] if overlapping else [blocks]:
            alive = [block for block in group if block.ended is None]
            yield from turns.turn_each(alive, Serve, ServeAll)
            yield from turns.agree(alive)

    def _record(self) -> Doing[None]:
        recorded = [block for block in self._in_step if block.records]
        for block in sorted(recorded, key=lambda block: block.order):
            if block.ended in (None, Ended.DONE):
                recorded = yield Record(block.key)
                if recorded.failure is not None:
                    yield from self._turns.fail(block, recorded.failure)

    # Its end.

    def model_ran(self, event: ModelRan) -> Doing[None]:
        """Look at what requests left in the cache."""
        present = self._present()
        if present:
            found = yield CheckCache(tuple(block.key for block in present))
            for key in found.looked_at:
                self._blocks.all[key].looked_at = True
            for key in found.blocks & self._blocks.all.keys():
                self._blocks.all[key].spoilt = True

    def ended(self, event: StepEnded) -> Doing[None]:
        """What was asked for in the step and has not come will not come; compare what blocks wrote."""
        turns = self._turns
        missed = []
        for block in self._present():
            if block.here is not None and block.key in self._blocks.live:
                missed.append(block)
                yield from turns.turn(block, Miss(block.key, not_reached(block.here)))
        turns.waiting.clear()
        turns.position = BETWEEN
        yield from turns.agree(missed)
        yield from vote(self._blocks, turns, self._present(), self._alone)
        for block in self._present():
            if block.key in self._blocks.live and not block.resting:
                yield from self._check_skips(block)
        for key in turns.batch:
            if key in self._blocks.all:
                yield from turns.stream(self._blocks.all[key])

    def _check_skips(self, block: Block) -> Doing[None]:
        """Fail a block that lets a module run whose cache lacks the steps that skipped it."""
        if not block.owes or block.ended not in (None, Ended.DONE):
            return
        gap = (yield CheckSkips(block.key)).gap
        if gap is None:
            return
        if block.ended is None:
            yield from self._turns.turn(block, Throw(block.key, gap))
        if not block.failed:
            yield from self._turns.fail(block, gap)
        else:
            yield from self._turns.follow(block)
