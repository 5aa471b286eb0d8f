"""A loop in the tables, as data: its steps, what runs in them, and what it leaves.

In the prompt's step a request has several rows, and in a later step one. So a loop has two plans if it begins with the prompt, a
phase for each. The taps that both have are there once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from executor.core.location import Location
from executor.graphs.operations import Tap
from executor.graphs.pieces import Collected
from executor.graphs.template import Lowered
from executor.model.tree import PSEUDO
from executor.plan.ir import Plan

# How many steps a plan with guards is looked at ahead.
AHEAD = 4096


@dataclass(frozen=True)
class Window:
    """Consecutive steps of a loop.

    Attributes:
        since: the next step of the request; the loop may begin later.
        first: the loop's first step.
        until: the step after the last; `ALL` for no end.
    """

    since: int
    first: int
    until: int


@dataclass(frozen=True)
class PlannedSteps:
    """Consecutive steps of a loop that have one plan.

    Attributes:
        plan: the plan; its guards hold in the steps. A plan for several rows is for the prompt's step.
        first, until: the first step, and the step after the last.
        longer: of a prompt's step without a plan of its own: the plan for a longer prompt; `plan` is for a shorter prompt.
    """

    plan: Plan
    first: int
    until: int
    longer: Plan | None = None


def asks_prompt(steps: Sequence[PlannedSteps]) -> bool:
    """Return whether planned steps ask for a module's value in the step of the prompt."""
    return any(one.first == 0 and any(read.path not in PSEUDO for read in one.plan.reads) for one in steps)


@dataclass(frozen=True)
class Phase:
    """Planned steps in the tables.

    Attributes:
        steps: the steps.
        lowered: what runs in them.
        numbers: for each tap of `lowered`, its number among those of the loop; for each value of a program likewise.
    """

    steps: PlannedSteps
    lowered: Lowered
    numbers: tuple[int, ...]


class ComeBack(Protocol):
    """Lets the block of a loop go on that has left the tables."""

    def __call__(self, left: Left, again: bool) -> Location:
        """Take what the loop left; return the step that the block waits for.

        Args:
            left: what the loop left.
            again: whether the loop may go into the tables again, with the plan for the steps that follow.
        """


@dataclass(frozen=True)
class Joined:
    """The steps of a loop as the tables have them.

    Attributes:
        phases: what runs, in the order of the steps.
        taps: of all phases, each once.
        changes: whether the cache has to be looked at.
        sites: where it has taps.
        program: the key of its program, "" for taps alone.
        opens: the first step of the program.
        prompt: the rows of the prompt's step for which the program runs: the first row and the row after the last; None: the
            program is for steps of one row.
        within, outside: whether a part of it runs in the model's pass, and at the logits or samples.
        meant: the plans and constants that it was made of, so that their ids stay theirs.
    """

    phases: tuple[Phase, ...]
    taps: tuple[Tap, ...]
    changes: bool
    sites: frozenset[int]
    program: str = ""
    opens: int = 0
    prompt: tuple[int, int] | None = None
    within: bool = True
    outside: bool = False
    meant: tuple[object, ...] = ()


@dataclass(eq=False)
class TableLoop:
    """A loop in the tables.

    Attributes:
        slot: its request's.
        joined: what runs.
        window: its steps.
        next: the next step of the request.
        once: whether its block asks for nothing in a step after its window: it is of the prompt's step alone.
        back: lets its block go on.
    """

    slot: int
    joined: Joined
    window: Window
    next: int
    once: bool
    back: ComeBack

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What runs, in the order of the steps."""
        return self.joined.phases

    @property
    def writes(self) -> bool:
        """Whether it changes the model's values."""
        return any(phase.steps.plan.writes for phase in self.phases)

    @property
    def runs_program(self) -> bool:
        """Whether its program is open in the next step."""
        return bool(self.joined.program) and self.joined.opens <= self.next

    def program_rows(self, count: int) -> range:
        """Return the rows of the next step for which its program runs; the step has `count` rows."""
        return range(*(self.joined.prompt or (0, 1))) if count > 1 else range(1)


@dataclass(frozen=True)
class Left:
    """What a loop left.

    Attributes:
        loop: the loop.
        passed: the steps of the request that went by.
        ran: how many of these were the loop's.
        read: what its taps read.
    """

    loop: TableLoop
    passed: int
    ran: int
    read: Collected

    def ran_in(self, phase: Phase) -> int:
        """Return how many steps of a phase ran."""
        return max(0, min(self.loop.window.first + self.ran, phase.steps.until) - phase.steps.first)


def values_of(left: Left, phase: Phase, on: torch.device | None) -> Mapping[int, torch.Tensor]:
    """Return the outputs of a plan in all steps of a phase: [steps, ...] each.

    Args:
        left: what the loop left.
        phase: of the loop; it ran at least one step.
        on: the device on which the block goes on with them; None: they stay on the host.
    """
    ran = left.ran_in(phase)
    read = left.read.of_prompt if phase.steps.plan.rows > 1 else left.read.of_later_steps

    def stacked(tap: int) -> torch.Tensor:  # [steps, rows, columns]
        values = read.stacked(phase.numbers[tap], ran)
        assert values is not None and len(values) == ran
        return values if on is None else values.to(on)

    return phase.lowered.values(stacked, ran)
