"""The state machine of a worker's blocks: `handle(event)` returns instructions.

The machine decides which block goes on and in which order, when a barrier opens, which gangs start, what fails with which
message, and what ends with a request. It runs no block and moves no tensor: the interleaver does that, and says what came of it.

An event begins something (`StepBegan`, `Reached`, `Generated`) or answers the last instruction of the list before it. So a list
of instructions ends at an instruction with an answer, or when nothing is left to do. Inside, each beginning is a generator that
yields the instructions that have answers.

Several ranks run the same machine on the same blocks. The instructions below are collective. Every rank must be given the same
ones in the same order, because the ranks meet in them.

- `Compare`, `CompareWritten` and `CompareAdmitted`: the ranks exchange numbers. With one rank there are none of these.
- `Serve`, `ServeAll` and `Record`: a value is gathered over the ranks and handed on between pipeline stages.
- `Apply`: a module is applied on all ranks.

A block may differ on one rank. So between two collective instructions the machine lets nothing but the block itself depend on
how its turn ended. When the ranks have compared, the block is the same on all of them, or has failed on all of them. The answer
to `FindChanged` is the same on all, because the ranks have compared what the blocks wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.core.ended import Ended
from executor.interleave.machine.blocks import Blocks
from executor.interleave.machine.endings import Endings
from executor.interleave.machine.events import (
    Admitted,
    Arrived,
    Dropped,
    Event,
    Generated,
    ModelRan,
    Preempted,
    Reached,
    Refused,
    Returned,
    StartedEarly,
    StepBegan,
    StepEnded,
)
from executor.interleave.machine.failures import NOT_BOUND
from executor.interleave.machine.instructions import CompareAdmitted, Instruction, Report
from executor.interleave.machine.steps import Steps
from executor.interleave.machine.turns import Doing, Turns


class UnexpectedEvent(RuntimeError):
    """An event came that the machine did not wait for."""


class Machine:
    """The state machine of one worker.

    Args:
        alone: whether the worker is the only rank.

    Attributes:
        alone: as given.
        blocks: the blocks that have not left.
        waiting: the blocks that wait for a location of the step that runs, by path and kind.
    """

    def __init__(self, alone: bool = True) -> None:
        self.blocks = Blocks()
        self.alone = alone
        self._turns = Turns(self.blocks, alone)
        self.waiting = self._turns.waiting
        self._out = self._turns.out
        steps = Steps(self.blocks, self._turns, alone)
        endings = Endings(self.blocks, self._turns, alone)
        self._begin: dict[type[Event], Callable[[Any], Doing[None]]] = {
            Arrived: self._arrived,
            StartedEarly: steps.started_early,
            Preempted: endings.preempted,
            StepBegan: steps.began,
            Reached: steps.reached,
            ModelRan: steps.model_ran,
            StepEnded: steps.ended,
            Generated: endings.generated,
            Dropped: endings.dropped,
        }
        self._doing: Doing[None] | None = None
        self._awaited: type[Event] | None = None

    @property
    def idle(self) -> bool:
        """Whether no block is here."""
        return not self.blocks

    def handle(self, *events: Event) -> list[Instruction]:
        """Take events in; return the instructions that follow.

        Raises:
            UnexpectedEvent: an answer that was not asked for, or something new before the answer.
        """
        for event in events:
            if self._doing is not None:
                if type(event) is not self._awaited:
                    raise UnexpectedEvent(f"{event} came instead of {self._awaited}")
                self._go_on(event)
            elif type(event) in self._begin:
                self._doing = self._begin[type(event)](event)
                self._go_on(None)
            elif isinstance(event, Admitted):
                self.blocks.add(event)
            elif isinstance(event, Returned):
                self.blocks.bring_back(event)
            elif isinstance(event, Refused):
                self._refused(event)
            else:
                raise UnexpectedEvent(f"{event} answers nothing")
        given = self._out[:]
        self._out.clear()
        return given

    def _go_on(self, answer: Event | None) -> None:
        """Run what has begun up to the next instruction that has an answer."""
        assert self._doing is not None
        try:
            instruction = self._doing.send(answer)
        except StopIteration:
            self._doing = None
            return
        self._awaited = instruction.answer
        self._out.append(instruction)

    def _refused(self, event: Refused) -> None:
        if event.joint:
            self.blocks.joint_refused[event.key] = event.trace
        else:
            self.blocks.refused[event.key] = event.trace
            self._out.append(Report(event.key, Ended.FAILED))

    def _arrived(self, event: Arrived) -> Doing[None]:
        """Fail the blocks that could not be bound on another rank."""
        if self.alone:
            return
        here = tuple(int(key in self.blocks.live) for key in event.keys)
        compared = yield CompareAdmitted(here)
        for i, key in enumerate(event.keys):
            block = self.blocks.live.get(key)
            if block is not None and not all(votes[i] for votes in compared.votes):
                yield from self._turns.fail(block, NOT_BOUND)
