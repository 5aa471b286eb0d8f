"""What the state machine wants done, by the interleaver.

`answer` names the event with which the interleaver answers an instruction. An instruction with an answer is the last of its list.
The docstring of `executor.interleave.machine.machine` says which instructions are collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from executor.core.ended import Ended
from executor.interleave.machine.events import (
    CacheSpoilt,
    Changed,
    Compared,
    Event,
    Failure,
    Recorded,
    Settled,
    SkipsChecked,
    Streamed,
    TurnEnded,
    TurnsEnded,
)

if TYPE_CHECKING:
    from interpose.v1 import trace_pb2 as pb


class Instruction:
    """Base of all instructions."""

    __slots__ = ()
    answer: ClassVar[type[Event] | None] = None


class Turn(Instruction):
    """Base of the instructions that let a block run until it waits again or ends."""

    __slots__ = ()
    answer = TurnEnded
    block: str


class SeveralTurns(Instruction):
    """Base of the instructions that let several blocks run once each, in their order.

    The blocks have nothing in common (`Admitted.apart`).
    """

    __slots__ = ()
    answer = TurnsEnded
    blocks: tuple[str, ...]


# Turns.


@dataclass(frozen=True, slots=True)
class Start(Turn):
    """Run a block up to the first location that it asks for.

    Attributes:
        tokens: the number of rows that the block sees in the step.
    """

    block: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Resume(Turn):
    """Resume a block with the news that the step it waits for has begun."""

    block: str


@dataclass(frozen=True, slots=True)
class Serve(Turn):
    """Resume a block with its rows of the location where the model is; write changes back."""

    block: str


@dataclass(frozen=True, slots=True)
class ResumeAll(SeveralTurns):
    """Resume blocks with the news that the step they wait for has begun."""

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServeAll(SeveralTurns):
    """Resume blocks with their rows of the location where the model is; write all changes back."""

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Apply(Turn):
    """Apply the module that a block calls, and resume the block with the outputs."""

    block: str


@dataclass(frozen=True, slots=True)
class Overrun(Turn):
    """Tell a block that calls a module that its time in this step is over."""

    block: str


@dataclass(frozen=True, slots=True)
class Throw(Turn):
    """Raise an error in a block, at the line where it waits."""

    block: str
    error: Failure


@dataclass(frozen=True, slots=True)
class Miss(Turn):
    """Raise an error in a block that waits for a location which the step did not reach.

    Nothing of the step is ahead of the block any more.
    """

    block: str
    error: Failure


@dataclass(frozen=True, slots=True)
class Pass(Turn):
    """Let a block go on from a barrier, or raise in it why no block passes the barrier.

    Attributes:
        position: the model's position in the step.
        error: why no block passes the barrier, if that is so.
    """

    block: str
    position: int
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class Finish(Turn):
    """Let a block run to its end: the generation is over."""

    block: str


# Comparisons over the ranks.


@dataclass(frozen=True, slots=True)
class Compare(Instruction):
    """Exchange how the turns of blocks ended.

    Votes: one number for each block that stands for the way it went, then one for each block that says if it is overdue, then
    one for each block that stands for its loop in the tables, 0 if it has none there.
    """

    answer = Compared
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompareWritten(Instruction):
    """Exchange what blocks wrote in the step.

    Votes: `spoilt`, then one number for each block that stands for all that it wrote.

    Attributes:
        spoilt: for each block, whether its request spoilt the cache on this rank.
    """

    answer = Compared
    blocks: tuple[str, ...]
    spoilt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompareAdmitted(Instruction):
    """Exchange which blocks could be bound.

    Votes: `here`.

    Attributes:
        here: for each block that came, whether it was bound on this rank.
    """

    answer = Compared
    here: tuple[int, ...]


# Questions.


@dataclass(frozen=True, slots=True)
class FindChanged(Instruction):
    """Find out which blocks changed anything in the model's pass; may wait for the device."""

    answer = Changed
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckCache(Instruction):
    """Have numbers that are not finite taken out of the cache.

    The answer names the blocks whose requests left any. It does not wait for the device, so it may name a block a step or two
    after the step in which the block did so.
    """

    answer = CacheSpoilt
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitCache(Instruction):
    """Find out whose requests left numbers that are not finite; waits for the device."""

    answer = CacheSpoilt
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckSkips(Instruction):
    """Find out if a block let a module run that it had to skip."""

    answer = SkipsChecked
    block: str


@dataclass(frozen=True, slots=True)
class Settle(Instruction):
    """Write back what a block changed at the location where the model is.

    Attributes:
        leaving: whether the model goes on, so that also a block at a barrier has to leave the location.
    """

    answer = Settled
    block: str
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Record(Instruction):
    """Record the values of the location where the model is, for a block with recorders."""

    answer = Recorded
    block: str


@dataclass(frozen=True, slots=True)
class Stream(Instruction):
    """Send what a block of a streamed trace saved in the step.

    Attributes:
        last: whether the block needs no further step.
    """

    answer = Streamed
    block: str
    last: bool


# Orders without an answer.


@dataclass(frozen=True, slots=True)
class BeginStep(Instruction):
    """The next step of these blocks' requests begins."""

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class See(Instruction):
    """A joint block sees the rows of these requests in this step."""

    block: str
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Withdraw(Instruction):
    """Take a block's loop out of the tables, because it is not there on all ranks."""

    block: str


@dataclass(frozen=True, slots=True)
class Hook(Instruction):
    """Say when the model comes to a location."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Break(Instruction):
    """No block can pass a barrier any more; a block that comes to it gets an error at once.

    Attributes:
        number: the index of the barrier in the trace.
        why: the message of the error.
    """

    trace: str
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Fail(Instruction):
    """End a block with a failure that is not its own."""

    block: str
    failure: Failure | pb.Failure


@dataclass(frozen=True, slots=True)
class FailForEdit(Instruction):
    """End a request's block with the failure of a standing edit that ran in the request."""

    block: str
    edit: str


@dataclass(frozen=True, slots=True)
class Cancel(Instruction):
    """End a block without a result."""

    block: str


@dataclass(frozen=True, slots=True)
class Report(Instruction):
    """Tell the scheduler, with this step's output, how the block of a request ended."""

    request: str
    ended: Ended


@dataclass(frozen=True, slots=True)
class Forget(Instruction):
    """Drop a block and its names."""

    block: str


@dataclass(frozen=True, slots=True)
class Close(Instruction):
    """A block has ended with its request: send what it saved, or why it failed."""

    block: str
