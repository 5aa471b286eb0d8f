"""What the state machine is told: events that begin something, and answers.

An event of the first kind comes when the machine waits for nothing. An answer follows the instruction that asked for it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor.core.ended import Ended
from executor.core.location import Location

if TYPE_CHECKING:
    from interpose.v1 import trace_pb2 as pb


class Code(enum.IntEnum):
    """The error codes that the machine gives, with the numbers of the protocol."""

    INTERVENTION = 1
    UNKNOWN_LOCATION = 2
    INVALID_ARGUMENT = 4
    UNAVAILABLE = 10
    ENGINE = 11


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a block fails, or an error that is raised in it.

    Attributes:
        code: an error code of the protocol.
        message: what happened, why, and what to write instead.
        location: the location that the failure is about, or "".
        exception_type, exception_message: the name and the text of an exception that stands for the failure, or "".
    """

    code: int
    message: str
    location: str = ""
    exception_type: str = ""
    exception_message: str = ""


@dataclass(frozen=True, slots=True)
class AtBarrier:
    """A barrier of a trace: its index in the trace, and how many blocks go on together."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"barrier {self.number + 1} (of {self.count})"


class Event:
    """Base of all events."""

    __slots__ = ()


# Events that begin something.


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A block was bound: a request's own block, a standing edit in a request, or a joint block.

    Size: all facts of a block that the machine's rules read.

    Attributes:
        key: the request's id; of other blocks a text that stands for the block.
        trace: the id of the block's trace.
        invoke: the index of the invoke in the trace.
        arrival: how many traces came to this worker before the trace.
        prompt_tokens: the length of the prompt in tokens; 0 for a joint block.
        gang: how many requests start together, this request included; 0 for no gang.
        joint: whether the block has no prompt of its own, and sees the rows of its gang.
        owner: the request that a standing edit runs in, or "".
        rank: the place of a block among the blocks of its request; edits are below 0.
        streamed: whether the block's saves leave step by step.
        apart: whether the block has no rows and no objects in common with another block, so that other blocks may take their
            turns before the block's changes are in the model.
    """

    key: str
    trace: str
    invoke: int
    arrival: int
    prompt_tokens: int
    gang: int = 0
    joint: bool = False
    owner: str = ""
    rank: int = 0
    streamed: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """A block could not be bound on this rank."""

    key: str
    trace: str
    joint: bool = False


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """All new requests of a step have been admitted or refused.

    Attributes:
        keys: the requests and the joint blocks that came, in the same order on every rank.
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartedEarly(Event):
    """Blocks start before their first step, so that their loops can be in the tables then.

    Attributes:
        keys: the blocks. The whole prompt of each is in the next step.
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """A loop of a block has come back from the tables, where steps went by without the block.

    Attributes:
        key: the block.
        steps: how many steps of the request went by.
        waits: what the block waits for now: a step, or the result.
        away: whether its loop is in the tables again, with another plan.
        looked_at: whether the cache was looked at for what the loop changed.
    """

    key: str
    steps: int
    waits: Location
    away: bool = False
    looked_at: bool = False


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The engine evicted a request and computes it anew, without the changes of its block."""

    request: str


@dataclass(frozen=True, slots=True)
class StepBegan(Event):
    """A forward pass begins.

    Attributes:
        tokens: the number of rows of each block that the step has, by key, in the order of the batch; no joint blocks.
    """

    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reached(Event):
    """The model is at a location.

    Attributes:
        path, kind: the location.
        position: the position of the location in the step (`ModuleTree.order_of`).
    """

    path: str
    kind: str
    position: int


@dataclass(frozen=True, slots=True)
class ModelRan(Event):
    """The modules have run, and the step's keys and values can still be found."""


@dataclass(frozen=True, slots=True)
class StepEnded(Event):
    """The step is over: its tokens have been sampled."""


@dataclass(frozen=True, slots=True)
class Generated(Event):
    """The engine has finished a request, or the requests that a joint block sees."""

    block: str


@dataclass(frozen=True, slots=True)
class Dropped(Event):
    """A trace was given up."""

    trace: str


# Answers.


@dataclass(frozen=True, slots=True)
class TurnEnded(Event):
    """A block had a turn, and waits again or has ended.

    Attributes:
        waits: the location that the block waits for, if it waits for one.
        ended: how the block ended, if it ended.
        barrier: the barrier that the block waits at.
        calls: the call of a module that the block waits for, as errors name it.
        overdue: whether the block has used more time in this step than its budget has; matters if it calls.
        owes: whether the block has skipped a module that it must skip in every later step.
        records: whether the block has values recorded from step to step.
        misfit: why the change at the location that the block left could not be written into the model.
        away: whether the steps up to the awaited step go by without the block, because its loop runs in the tables.
    """

    waits: Location | None = None
    ended: Ended | None = None
    barrier: AtBarrier | None = None
    calls: object | None = None
    overdue: bool = False
    owes: bool = False
    records: bool = False
    misfit: Failure | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class TurnsEnded(Event):
    """Several blocks had a turn each.

    Attributes:
        turns: how the turns ended, in the order of the instruction's blocks.
    """

    turns: Sequence[TurnEnded]


@dataclass(frozen=True, slots=True)
class Settled(Event):
    """What a block changed at a location is in the model, unless it did not fit."""

    misfit: Failure | None = None


@dataclass(frozen=True, slots=True)
class Compared(Event):
    """The numbers of every rank, in rank order, as the instruction describes them."""

    votes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Changed(Event):
    """Which of the blocks in question have changed anything in the model's pass."""

    blocks: frozenset[str]


@dataclass(frozen=True, slots=True)
class CacheSpoilt(Event):
    """The blocks whose requests left numbers that are not finite in the cache.

    A rank names the blocks that it knows of so far.

    Attributes:
        blocks: these blocks; each is named once.
        looked_at: the blocks whose requests were looked at in this step, the same on every rank.
    """

    blocks: frozenset[str]
    looked_at: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SkipsChecked(Event):
    """Why a block cannot go on after it let a skipped module run, if it did."""

    gap: Failure | None = None


@dataclass(frozen=True, slots=True)
class Recorded(Event):
    """The values of a location were recorded for a block, or the block fails."""

    failure: pb.Failure | None = None


@dataclass(frozen=True, slots=True)
class Streamed(Event):
    """The saves of a step left; if `sent` is false they could not be encoded."""

    sent: bool = True
