"""What is known of one block, as data: its progress, its ending, and a record of its run.

Two sides hold the state, and take strict turns. The block's side (`executor.block.runner`) writes what the block waits for and
how the block ended. The forward's side (`executor.block.mediator`) writes where the model is and what the block is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from executor.block.barrier import Barrier
from executor.block.cache import Recorder
from executor.block.identity import Identity
from executor.block.stale_writes import StaleWrites
from executor.block.tally import Tally
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.location import Kind, Location
from executor.model.call import Call
from executor.model.meta_tensors import Fakes
from executor.model.skips import Skips
from executor.model.values import Served
from executor.saves.registry import SaveRegistry
from interpose.v1 import trace_pb2 as pb


@dataclass(slots=True)
class Progress:
    """Where a block's request is. The forward's side writes it.

    Size: data: each field is a figure of the request.

    Attributes:
        prompt_tokens: the length of the prompt; of a joint block, of all prompts that it sees, once it has started.
        last: how many of the prompt's last rows the block may get, where the others may come from the prefix cache; 0: all rows
            are computed, or the block gets none.
        step: the step that the request is in; -1 before the first step.
        position: the model's position in that step (`ModuleTree.order_of`).
        counted: the last step whose tier is counted.
        served, served_at: the value that the block was served, and its location, while the block is there.
        used: the seconds that the block has taken in this step, with the modules that it applied.
        before: the seconds that it took in the steps before.
        charged: the seconds of both that the scheduler knows of.
        finished, result: whether the generation is over, and the generation's result.
    """

    prompt_tokens: int
    last: int = 0
    step: int = -1
    position: int = -1
    counted: int = -1
    served: Served | None = None
    served_at: Location | None = None
    used: float = 0.0
    before: float = 0.0
    charged: float = 0.0
    finished: bool = False
    result: Any = None


@dataclass(slots=True)
class Waits:
    """What a block waits for. The block's side writes it.

    Attributes:
        location: the location, the step, the result or the barrier; None while the block waits for a module or has ended.
        call: the module that the block wants applied, while it waits for that.
        barrier: the barrier, while the block waits there.
        result_asked: whether the block has asked for the result, which lets the whole generation pass.
        away: whether the steps up to the awaited step go by without the block, because its loop runs in the tables.
        away_as: a number other than 0 that stands for what runs there, where other ranks are to run the same.
    """

    location: Location | None = None
    call: Call | None = None
    barrier: Barrier | None = None
    result_asked: bool = False
    away: bool = False
    away_as: int = 0


@dataclass(slots=True)
class Ending:
    """How a block ended.

    Attributes:
        ended: None while the block lives.
        failure: why the block failed, if it did.
    """

    ended: Ended | None = None
    failure: pb.Failure | None = None


class Explains(Protocol):
    """Says how the parts of a block would run, when the block has ended."""

    def explanation(self) -> pb.Explanation:
        """Return what was found."""

    def excuses(self, failure: pb.Failure) -> bool:
        """Return whether a failure of the block is of the explanation alone, and of no trace."""


@dataclass(slots=True)
class Record:
    """What a block did.

    Attributes:
        skips: the modules that the block skips.
        recorders: what the block has recorded from step to step.
        stale_writes: the values that the block was served and may change no longer.
        tally: where the block was served, where it wrote, and the tiers of its steps.
        wrote: digests of the values that the block wrote in this step, where other ranks are to have written the same.
        logs: how often the block printed.
        explains: of a block that is explained; None for any other block.
    """

    skips: Skips
    recorders: list[Recorder] = field(default_factory=list)
    stale_writes: StaleWrites = field(default_factory=StaleWrites)
    tally: Tally = field(default_factory=Tally)
    wrote: list[torch.Tensor] = field(default_factory=list)
    logs: int = 0
    explains: Explains | None = None


@dataclass(eq=False, slots=True)
class BlockState:
    """The state of one block.

    Attributes:
        identity: which block it is.
        registry: the trace's saved values.
        emit: called with text that the block prints; returns whether the text was sent.
        progress: where the request is.
        record: what the block did.
        fakes: makes the tensors of a block that is scanned; None for any other block.
        waits: what the block waits for.
        ending: how the block ended.
    """

    identity: Identity
    registry: SaveRegistry
    emit: Callable[[str], bool]
    progress: Progress
    record: Record
    fakes: Fakes | None = None
    waits: Waits = field(default_factory=Waits)
    ending: Ending = field(default_factory=Ending)

    @property
    def live(self) -> bool:
        """Whether the block still waits for something."""
        return self.ending.ended is None

    @property
    def resting(self) -> bool:
        """Whether the block has ended or waits for the result: it asks for nothing in a coming step."""
        location = self.waits.location
        return self.ending.ended is not None or (location is not None and location.kind == Kind.RESULT)

    @property
    def changed(self) -> bool:
        """Whether the block changed anything in the model's pass.

        Then computing the request anew would be wrong.
        """
        return bool(self.record.tally.writes or self.record.skips.fingerprint())

    @property
    def steps(self) -> int:
        """Steps begun."""
        return self.progress.step + 1

    def ran(self, tier: str, why: str = "") -> None:
        """Count the tier of the step that the request is in.

        The first tier that is counted for a step stands.

        Args:
            tier, why: as of `Tally.ran`.
        """
        progress = self.progress
        if progress.step > progress.counted and not progress.finished:
            progress.counted = progress.step
            self.record.tally.ran(tier, 1, why)

    def never(self, location: Location) -> Refusal:
        """Why a location is not served: the generation is over."""
        message = f"{location} was never reached: the generation ended after {self.steps} step{'s' if self.steps != 1 else ''}"
        if self.waits.result_asked:
            message += ". tracer.result waits for the end of the generation, and the block read it first; read it last"
        return Refusal(pb.ERROR_CODE_UNKNOWN_LOCATION, message, location=str(location))
