"""Loops over steps that run in the tables, while their blocks stay parked.

A loop whose plan `lower` takes goes into the tables before its first step, which may be the prompt's. From then on the engine's
steps run its taps, in a captured graph or at hooks, and nothing of the block runs. When the request ends, or no plan is for
further steps, the loop comes back with all that it read, and its block goes on.

In the prompt's step a request has several rows, and in a later step one. So a loop has two plans if it begins with the prompt, a
phase for each. The taps that both have are there once.

Size: a loop's life in the tables, and the steps meanwhile.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from executor.core.location import Location
from executor.graphs.buffers import Outputs
from executor.graphs.extents import Full
from executor.graphs.lower import Lowerer
from executor.graphs.merge import merged
from executor.graphs.operations import Refused, Tap
from executor.graphs.outside import Outside
from executor.graphs.pieces import Collected
from executor.graphs.programs import Programs
from executor.graphs.tables import Outgoing, Tables
from executor.graphs.taps import Taps
from executor.graphs.template import Lowered
from executor.model.kv_guard import CacheGuard
from executor.model.tree import PSEUDO
from executor.plan.ir import Plan
from executor.plan.run import Member, inputs_of

# How many steps a plan with guards is looked at ahead.
AHEAD = 4096
_REASONS = 64  # reasons that are counted
_MOST_LOWERED = 64  # loops that are remembered as the tables have them


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
class _Lowered:
    """The steps of a loop as the tables have them.

    Attributes:
        phases: what runs, in the order of the steps.
        taps: of all phases, each once.
        program: the key of the program, "" for taps alone.
        changes: whether the cache has to be looked at.
        sites, within, outside: as of `TableLoop`.
        meant: the plans and constants that it was made of, so that their ids stay theirs.
    """

    phases: tuple[Phase, ...]
    taps: tuple[Tap, ...]
    program: str
    changes: bool
    sites: frozenset[int]
    within: bool
    outside: bool
    meant: tuple[object, ...] = ()


@dataclass(eq=False)
class TableLoop:
    """A loop in the tables.

    Attributes:
        slot: its request's.
        phases: what runs, in the order of the steps.
        window: its steps.
        next: the next step of the request.
        sites: where it has taps.
        program: the key of its program, "" for a loop of taps alone.
        once: whether its block asks for nothing in a step after its window: it is of the prompt's step alone.
        within, outside: whether a part of it runs in the model's pass, and at the logits or samples.
        back: lets its block go on.
    """

    slot: int
    phases: tuple[Phase, ...]
    window: Window
    next: int
    sites: frozenset[int]
    program: str
    once: bool
    within: bool
    outside: bool
    back: ComeBack

    @property
    def writes(self) -> bool:
        """Whether it changes the model's values."""
        return any(phase.steps.plan.writes for phase in self.phases)

    @property
    def runs_program(self) -> bool:
        """Whether its program is open in the next step."""
        return bool(self.program) and self.phases[-1].steps.first <= self.next


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


class TableLoops:
    """The loops of one worker's requests that run in the tables.

    Size: what a step of the loops has to do with, and where the steps are.

    Args:
        taps: the model's sites.
        tables: of these sites.
        outputs: carries what taps read to the host.
        cache: looks after what the loops leave in the engine's cache.
        programs: run what no taps can; None: such loops stay out of the tables.

    Attributes:
        steps: how many steps of loops ran in the tables.
        refused: why loops did not go into the tables, and how often.
    """

    def __init__(
        self, taps: Taps, tables: Tables, outputs: Outputs, cache: CacheGuard, programs: Programs | None = None
    ) -> None:
        self._taps = taps
        self._cache = cache
        self._programs = programs
        self._lowerer = Lowerer({one.key: i for i, one in enumerate(taps.sites)})
        self._tables = tables
        self._outputs = outputs
        self._lowered_once: OrderedDict[tuple[object, ...], _Lowered] = OrderedDict()
        self._free = list(range(tables.slots))[::-1]
        self._loops: dict[str, TableLoop] = {}
        self._resting: dict[str, TableLoop] = {}  # out of the tables; what they have read waits for the end
        self._keys: dict[int, str] = {}
        self._present: list[TableLoop] = []
        self._outgoing: tuple[Outgoing, Outgoing] | None = None
        self._padded = 0
        self._program_rows: list[int] = []  # the rows of the requests with a program
        self._outside: list[Outside] = []  # what runs after the pass of the step
        self._quiet = self._repeated = 0  # steps that may repeat the last one, and steps that have
        self._stale = False  # whether loops have come since the last step began
        self.steps = 0
        self.refused: dict[str, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._loops or key in self._resting

    def __bool__(self) -> bool:
        return bool(self._loops or self._resting)

    def enter(
        self,
        key: str,
        tenant: str,
        steps: Sequence[PlannedSteps],
        member: Member,
        since: int,
        back: ComeBack,
        rows: int = 1,
        alike: object = None,
        once: bool = False,
    ) -> str:
        """Put a loop into the tables; return why this cannot be, "" if it is there.

        Args:
            key: the request.
            tenant: whose share of the tables' memory it takes.
            steps: its steps, one after the other.
            member: what its block reads.
            since: the next step of the request.
            back: lets its block go on.
            rows: the rows of the request in the next step.
            alike: an object that stands for the tensors that its block reads, which nothing changes; None: none does.
            once: as of `TableLoop`.
        """
        if not self._free:
            return "more requests than the tables have places"
        slot = self._free[-1]
        try:
            made = self._joined(slot, tenant, steps, member, rows, alike)
        except (Refused, Full) as why:
            if len(self.refused) < _REASONS:
                self.refused[str(why)] = self.refused.get(str(why), 0) + 1
            return str(why)
        self._free.pop()
        self._settle()
        self._stale = True
        window = Window(since, steps[0].first, steps[-1].until)
        self._loops[key] = TableLoop(
            slot, made.phases, window, since, made.sites, made.program, once, made.within, made.outside, back
        )
        self._keys[slot] = key
        return ""

    def why_not(self, tenant: str, steps: Sequence[PlannedSteps], member: Member, rows: int = 1) -> str:
        """Return why a loop could not go into the tables now, "" if it could.

        The loop goes in and out again.

        Args:
            tenant, steps, member, rows: as of `enter`.
        """
        self._settle()
        if not self._free:
            return "more requests than the tables have places"
        slot = self._free[-1]
        try:
            made = self._joined(slot, tenant, steps, member, rows)
        except (Refused, Full) as why:
            return str(why)
        self._tables.leave(slot)
        if made.program and self._programs is not None:
            self._programs.leave(slot)
        return ""

    def _joined(
        self,
        slot: int,
        tenant: str,
        steps: Sequence[PlannedSteps],
        member: Member,
        rows: int,
        alike: object = None,
    ) -> _Lowered:
        """Give a request taps or a program; return them.

        Raises:
            Refused, Full: neither can be. Nothing of it stays.
        """
        meant = (*(one.plan for one in steps), alike)
        key = (*map(id, meant), *((one.first, one.until) for one in steps), rows)
        known = self._lowered_once.get(key) if alike is not None else None
        if known is not None:
            self._lowered_once.move_to_end(key)
            self._tables.join(slot, tenant, known.taps, rows, changes=known.changes, again=True)
            return known
        made = self._made(slot, tenant, steps, member, rows)
        if alike is not None and not made.program:
            self._lowered_once[key] = replace(made, meant=meant)
            if len(self._lowered_once) > _MOST_LOWERED:
                self._lowered_once.popitem(last=False)
        return made

    def _made(self, slot: int, tenant: str, steps: Sequence[PlannedSteps], member: Member, rows: int) -> _Lowered:
        """Make taps or a program for a request, as `_joined` does."""
        writes = ((one.plan, write) for one in steps for write in one.plan.writes)
        changes = any(plan.reads[write.read].path not in PSEUDO for plan, write in writes)
        if changes and self._cache.why_not_looked_at:
            raise Refused(self._cache.why_not_looked_at)
        lowered = [self._lowered(one, member, rows) for one in steps[:-1]]
        last, why = steps[-1], ""
        try:
            lowered.append(self._lowered(last, member, rows))
            taps, numbers = merged([one.taps for one in lowered])
            self._tables.join(slot, tenant, taps, rows, changes=changes)
            found = zip(steps, lowered, numbers, strict=True)
            return _lowered_of(tuple(Phase(*one) for one in found), taps, changes)
        except Refused as refused:
            why = str(refused)
        before = lowered[: len(steps) - 1]
        with_prompt = rows > 1 and last.first == 0  # a program is for one row of a request
        # The program would begin with what the block carried before the prompt.
        stale = any(one.plan.carried for one in steps[:-1])
        apart = len(steps) > 1 and any(read.path in PSEUDO for read in last.plan.reads)
        if self._programs is None or with_prompt or stale or apart:
            raise Refused(why)
        made = self._programs.join(slot, tenant, last.plan, member.environment, (last.first, last.until))
        taps, numbers = merged([one.taps for one in before])
        emitted = made.emitted
        try:
            self._tables.join(slot, tenant, taps, rows, emitted, changes=changes)
        except BaseException:
            self._programs.leave(slot)
            raise
        of_program = tuple(range(len(taps), len(taps) + len(emitted.forms)))
        found = zip(steps, (*before, made.lowered), (*numbers, of_program), strict=True)
        return _lowered_of(tuple(Phase(*one) for one in found), taps, changes, made.key)

    def _lowered(self, steps: PlannedSteps, member: Member, rows: int) -> Lowered:
        """Return some steps as taps.

        Raises:
            Refused: they cannot be.
        """
        plan, longer = steps.plan, steps.longer
        if longer is not None:
            span = steps.first, steps.until
            return self._lowerer.lower_between(plan, longer, rows, inputs_of(plan, member), span)
        return self._lowerer.lower(plan, inputs_of(plan, member), (steps.first, steps.until))

    def due(self, key: str) -> bool:
        """Return whether the next step of a request is no more a step of its loop in the tables."""
        self._settle()
        loop = self._loops.get(key)
        return loop is not None and loop.next >= loop.window.until

    def present(self, keys: Iterable[str]) -> list[str]:
        """Return the requests that have a loop in the tables."""
        loops = self._loops
        return [key for key in keys if key in loops] if loops else []

    def sites_of(self, keys: Iterable[str]) -> frozenset[int]:
        """Return the sites at which some requests have taps."""
        return frozenset().union(*{self._loops[key].sites for key in keys})

    def programs_of(self, keys: Iterable[str]) -> frozenset[str]:
        """Return the programs of some requests that run in the pass of the next step."""
        loops = (self._loops[key] for key in keys)
        return frozenset(loop.program for loop in loops if loop.runs_program and loop.within)

    def program_of(self, key: str) -> str:
        """Return the key of the program of a request's loop, "" for a loop of taps alone."""
        return self._loops[key].program

    def in_pass(self, keys: Iterable[str]) -> bool:
        """Return whether loops of some requests run in the pass of the next step.

        Other loops run after it alone.
        """
        loops = (self._loops[key] for key in keys)
        return any(loop.within and loop.window.first <= loop.next for loop in loops)

    def changes(self, keys: Iterable[str]) -> list[str]:
        """Return the requests among some whose loops change the model's values."""
        return [key for key in keys if (self._loops.get(key) or self._resting[key]).writes]

    def begin_step(self, batch: Iterable[tuple[str, int]], riding: Collection[str], padded: int) -> None:
        """Write the tables of a step.

        Args:
            batch: every request of the step and the number of its rows, in the order of the rows.
            riding: the requests of the step with a loop in the tables. A loop that came after the step began is not among them.
            padded: the rows of the tensors, padding included.
        """
        nobody = self._tables.slots
        self._settle()
        self._stale = False
        self._padded = padded
        loops = {key: self._loops[key] for key in riding}
        self._present = list(loops.values())
        rows = [(loops[key].slot if key in loops else nobody, count) for key, count in batch]
        begins = itertools.accumulate((count for _, count in rows), initial=0)
        with_programs = {loop.slot for loop in self._present if loop.runs_program and loop.within}
        self._program_rows = [at for (slot, _), at in zip(rows, begins, strict=False) if slot in with_programs]
        self._outgoing = self._tables.begin_step(rows, {loop.slot: loop.next for loop in self._present}, padded)
        self._outputs.before(self._outgoing)
        self._outside = self._opened(rows) if any(loop.outside for loop in self._present) else []

    def _opened(self, rows: Sequence[tuple[int, int]]) -> list[Outside]:
        """Return what runs after the pass of a step.

        Args:
            rows: the slot and the number of rows of each request of the batch.
        """
        assert self._programs is not None
        at = {slot: i for i, (slot, _) in enumerate(rows)}
        found: dict[str, list[int]] = {}
        for loop in self._present:
            if loop.outside and loop.window.first <= loop.next < loop.window.until:
                found.setdefault(loop.program, []).append(loop.slot)
        return [
            Outside(self._programs.program_of(key), self._tables, self._outputs.ring, [at[one] for one in slots], slots)
            for key, slots in found.items()
        ]

    @property
    def outside(self) -> bool:
        """Whether loops of the step run at the logits or the samples."""
        return bool(self._outside)

    def visit(self, path: str, value: torch.Tensor) -> torch.Tensor:  # [requests of the batch, ...]
        """Run what loops do at the logits or the samples; return what the engine goes on with."""
        for one in self._outside:
            value = one.visit(path, value)
        return value

    def compile_kernels(self) -> None:
        """Compile the kernel of each site, on CUDA."""
        from executor.graphs.kernel import compile_all

        compile_all(self._tables, frozenset(i for i, site in enumerate(self._taps.sites) if len(site.at) == 2))

    def blank(self, rows: int) -> None:
        """Have the next pass run no tap and append nothing: a capture, whose rows are nobody's."""
        self._settle()
        self._tables.blank(rows)
        self._outputs.pause()

    def read_now(self) -> torch.Tensor:
        """Return a copy of what the loops of the step have left, bit by bit: [bytes]."""
        assert self._outgoing is not None
        return self._tables.read_now(self._outgoing)

    def ran(self, slots: Mapping[str, torch.Tensor], rows: int) -> None:
        """Look after the cache and append what was read, when the model has run; can be captured.

        Args:
            slots: where each row's keys and values went, [rows or more] by the layer's name.
            rows: of the step, padding included.
        """
        self._cache.launch(slots, self._tables.owners[:rows], self._tables.flags)
        self._outputs.ring.append()

    def ran_apart(self) -> None:
        """Append for a step of the engine's own, in whose pass no loop runs."""
        self._outputs.ring.append()

    def again(self) -> None:
        """Have the next pass append where the step that was given to the device last did."""
        self._settle()
        self._outputs.again()

    @contextmanager
    def running(self, keys: Collection[str]) -> Iterator[None]:
        """Return a context for the model's pass with the loops of some requests, in an eager step."""
        # A long prompt beside the loops would make programs for all rows expensive.
        only = torch.tensor(self._program_rows, dtype=torch.int64).to(self._tables.output.device, non_blocking=True)
        with self.hooked(self.sites_of(keys), self.programs_of(keys), only):
            yield
        self._cache.launch_here(self._tables.owners[: self._padded], self._tables.flags)
        self._outputs.ring.append()

    @contextmanager
    def hooked(
        self, sites: Iterable[int], programs: Collection[str], only: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Return a context in which the model's modules run the taps of some sites, and programs.

        Args:
            sites, programs: their numbers and keys.
            only: int64 [some rows], the rows that programs run for; None: for all rows, as in a graph.
        """
        with ExitStack() as stack:
            stack.enter_context(self._taps.hooked(sites))
            if programs and self._programs is not None:
                stack.enter_context(self._programs.hooked(programs, only))
            yield

    def unchanged(self, programs: Collection[str]) -> AbstractContextManager[None]:
        """Return a context for a pass that does not count: programs carry on from before it."""
        return self._programs.unchanged(programs) if programs and self._programs is not None else nullcontext()

    def end_step(self) -> None:
        """Note that the step was given to the device."""
        assert self._outgoing is not None
        self._outputs.after(self._outgoing, self._keys)
        for loop in self._present:
            loop.next += 1
        if self._stale:  # a loop has come since the step began
            return
        edges = (min(loop.window.until, self._tables.edge(loop.slot)) - loop.next for loop in self._present)
        self._quiet = min(min(edges, default=0), self._outputs.room(self._outgoing))

    def rest(self) -> list[str]:
        """Take the loops of the step out of the tables whose blocks ask for nothing in a later step.

        What they have read is taken by `leave`, at the end of their requests. Called when the step has ended.

        Returns:
            Their requests.
        """
        keys = [self._keys[one.slot] for one in self._present if one.once and one.next >= one.window.until]
        for key in keys:
            loop = self._resting[key] = self._out(key)
            self._watch(loop, key)
        return keys

    def _watch(self, loop: TableLoop, key: str) -> None:
        """Have it looked at whether a loop that has gone left numbers that are not finite."""
        if loop.writes:
            self._cache.watch(self._tables.flags[loop.slot : loop.slot + 1].clone(), [(key,)])

    @property
    def repeats(self) -> bool:
        """Whether the next step needs nothing but `repeat` if its batch is that of the last step."""
        return self._quiet > 0

    def repeat(self) -> None:
        """Note that a step like the last one was given to the device."""
        self._quiet -= 1
        self._repeated += 1

    def _settle(self) -> None:
        """Count the repeated steps; the next step is no repetition."""
        if self._repeated:
            self._outputs.repeat(self._repeated)
            for loop in self._present:
                loop.next += self._repeated
        self._quiet = self._repeated = 0

    def loop_of(self, key: str) -> TableLoop:
        """Return the loop of a request."""
        return self._loops[key]

    def ran_of(self, key: str, steps: int) -> int:
        """Return how many steps of a request's loop have run, if the request had so many steps."""
        self._settle()
        loop = self._loops[key]
        return min(loop.next, steps, loop.window.until) - loop.window.first

    def flagged(self, keys: Iterable[str]) -> set[str]:
        """Return the requests among some that left numbers in the cache that are not finite.

        The call waits for the device.
        """
        writing = [key for key in keys if self._loops[key].writes]
        if not writing:
            return set()
        flags = self._tables.flags.tolist()
        return {key for key in writing if flags[self._loops[key].slot]}

    def leave(self, key: str, steps: int | None = None, watched: bool = True) -> Left:
        """Take a loop out of the tables; wait for what it has read.

        Args:
            key: the request.
            steps: how many steps the request had; more may have run. None: as many as ran.
            watched: whether the cache's guard is to say what the loop left in the cache; `flagged` has said it otherwise.
        """
        self._settle()  # what is collected counts the steps
        loop = self._resting.pop(key, None)
        if loop is None:
            loop = self._out(key)
            if watched:
                self._watch(loop, key)
            stop = loop.next if steps is None else min(loop.next, steps)
        else:
            stop = loop.next
        window = loop.window
        ran = max(0, min(stop, window.until) - window.first)
        self.steps += ran
        return Left(loop, max(0, stop - window.since), ran, self._outputs.collect(key))

    def close(self) -> None:
        """End what runs beside the engine."""
        self._outputs.close()

    def drop(self, key: str) -> None:
        """Forget the loop of a request, if it has one."""
        if key in self._loops:
            self._out(key)
            self._outputs.drop(key)
        elif self._resting.pop(key, None) is not None:
            self._outputs.drop(key)

    def _out(self, key: str) -> TableLoop:
        self._settle()
        loop = self._loops.pop(key)
        if loop in self._present:
            self._present.remove(loop)
        del self._keys[loop.slot]
        self._tables.leave(loop.slot)
        if loop.program and self._programs is not None:
            self._programs.leave(loop.slot)
        self._free.append(loop.slot)
        return loop


def _lowered_of(phases: tuple[Phase, ...], taps: tuple[Tap, ...], changes: bool, program: str = "") -> _Lowered:
    """Return a loop as the tables have it; the arguments are attributes of `_Lowered`."""
    sites = frozenset(tap.site for phase in phases for tap in phase.lowered.taps)
    read = [read.path in PSEUDO for phase in phases for read in phase.steps.plan.reads]
    outside = bool(program) and any(read)  # taps alone need nothing of the logits that their block looks at
    within = not outside or not all(read)
    return _Lowered(phases, taps, program, changes, sites, within, outside)


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
