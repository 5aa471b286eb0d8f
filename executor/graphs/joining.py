"""Gives a request's loop what runs for it in the tables: taps, or a program.

A loop from the prompt on has a plan for the prompt's step and a plan for the steps after it. If the tables have taps for both,
these run. If they have taps for the prompt's step alone, a program runs after them. If they have none for the prompt's step, the
program runs in that step too, for rows of the prompt (`executor.graphs.by_rows`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from executor.graphs.by_rows import ByRows, between, by_rows
from executor.graphs.lower import Lowerer
from executor.graphs.merge import merged
from executor.graphs.operations import Refused, Tap
from executor.graphs.programs import InProgram, Programs
from executor.graphs.table_loop import Joined, Phase, PlannedSteps
from executor.graphs.tables import Tables
from executor.graphs.template import Lowered
from executor.model.kv_guard import CacheGuard
from executor.model.tree import PSEUDO
from executor.plan.ir import Plan
from executor.plan.run import Member, inputs_of

_MOST_JOINED = 64  # loops that are remembered as the tables have them
_MOST_BY_ROWS = 512  # plans for prompts that are remembered


class Joining:
    """Gives the requests of one worker taps and programs.

    Args:
        lowerer: makes taps of plans.
        tables: of the model's sites.
        cache: looks after what the loops leave in the engine's cache.
        programs: run what no taps can; None: such loops stay out of the tables.
    """

    def __init__(self, lowerer: Lowerer, tables: Tables, cache: CacheGuard, programs: Programs | None) -> None:
        self._lowerer = lowerer
        self._tables = tables
        self._cache = cache
        self._programs = programs
        self._joined_once: OrderedDict[tuple[object, ...], Joined] = OrderedDict()
        self._by_rows: OrderedDict[tuple[str, ...], ByRows | str] = OrderedDict()

    def join(
        self,
        slot: int,
        tenant: str,
        steps: Sequence[PlannedSteps],
        member: Member,
        rows: int,
        alike: object = None,
    ) -> Joined:
        """Give a request taps or a program; return them.

        Args:
            slot: the request's.
            tenant, steps, member, rows, alike: as of `TableLoops.enter`.

        Raises:
            Refused, Full: neither can be. Nothing of it stays.
        """
        meant = (*(one.plan for one in steps), alike)
        key = (*map(id, meant), *((one.first, one.until) for one in steps), rows)
        known = self._joined_once.get(key) if alike is not None else None
        if known is not None:
            self._joined_once.move_to_end(key)
            self._tables.join(slot, tenant, known.taps, rows, changes=known.changes, again=True)
            return known
        made = self._made(slot, tenant, steps, member, rows)
        if alike is not None and not made.program:
            self._joined_once[key] = replace(made, meant=meant)
            if len(self._joined_once) > _MOST_JOINED:
                self._joined_once.popitem(last=False)
        return made

    def leave(self, slot: int, made: Joined) -> None:
        """Take a request's taps and program out again."""
        self._tables.leave(slot)
        if made.program and self._programs is not None:
            self._programs.leave(slot)

    def _made(self, slot: int, tenant: str, steps: Sequence[PlannedSteps], member: Member, rows: int) -> Joined:
        """Make taps or a program for a request, as `join` does."""
        writes = ((one.plan, write) for one in steps for write in one.plan.writes)
        changes = any(plan.reads[write.read].path not in PSEUDO for plan, write in writes)
        if changes and self._cache.why_not_looked_at:
            raise Refused(self._cache.why_not_looked_at)
        before: list[Lowered] = []
        prompt: ByRows | None = None
        try:
            before.extend(self._taps_of(one, member, rows) for one in steps[:-1])
        except Refused as refused:
            prompt = self._prompt_by_rows(steps, rows, refused)
        last, why = steps[-1], ""
        try:
            if prompt is None:
                lowered = [*before, self._taps_of(last, member, rows)]
                taps, numbers = merged([one.taps for one in lowered])
                self._tables.join(slot, tenant, taps, rows, changes=changes)
                found = zip(steps, lowered, numbers, strict=True)
                return _joined_of(tuple(Phase(*one) for one in found), taps, changes)
        except Refused as refused:
            why = str(refused)
        with_prompt = rows > 1 and last.first == 0  # a program is for one row of a request
        # The program would begin with what the block carried before the prompt.
        stale = any(one.plan.carried for one in steps[:-1])
        apart = len(steps) > 1 and any(read.path in PSEUDO for read in last.plan.reads)
        if self._programs is None or with_prompt or stale or apart:
            raise Refused(why)
        span = last.first if prompt is None else steps[0].first, last.until
        made = self._programs.join(slot, tenant, last.plan, member.environment, span, prompt)
        taps, numbers = merged([one.taps for one in before])
        try:
            self._tables.join(slot, tenant, taps, rows, made.emitted, changes=changes)
        except BaseException:
            self._programs.leave(slot)
            raise
        if made.in_prompt is not None:
            before.append(made.in_prompt)
        return _with_program(steps, before, numbers, taps, made, changes)

    def _prompt_by_rows(self, steps: Sequence[PlannedSteps], rows: int, why: Refused) -> ByRows:
        """Return how the plan for the prompt's step is the plan for the steps after it.

        Args:
            steps, rows: as of `join`.
            why: the reason why the prompt's step has no taps.

        Raises:
            Refused: it is another plan.
        """
        if self._programs is None or len(steps) != 2 or rows == 1 or not steps[1].plan.holds(steps[0].first):
            raise why
        [first, last] = steps
        if first.longer is None:
            return self._rows_of(first.plan, last.plan)
        key = (first.plan.key, first.longer.key, last.plan.key, str(rows))
        low, high = self._rows_of(first.plan, last.plan), self._rows_of(first.longer, last.plan)
        longer = first.longer
        return self._kept(key, lambda: between((first.plan, low), (longer, high), rows))

    def _rows_of(self, plan: Plan, one: Plan) -> ByRows:
        return self._kept((plan.key, one.key), lambda: by_rows(plan, one))

    def _kept(self, key: tuple[str, ...], make: Callable[[], ByRows]) -> ByRows:
        """Return what is known under a key, made if there is nothing.

        Raises:
            Refused: of `make`, now or when it was tried before.
        """
        found = self._by_rows.get(key)
        if found is None:
            try:
                found = make()
            except Refused as refused:
                found = str(refused)
            self._by_rows[key] = found
            if len(self._by_rows) > _MOST_BY_ROWS:
                self._by_rows.popitem(last=False)
        else:
            self._by_rows.move_to_end(key)
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _taps_of(self, steps: PlannedSteps, member: Member, rows: int) -> Lowered:
        """Return some steps as taps.

        Raises:
            Refused: they cannot be.
        """
        plan, longer = steps.plan, steps.longer
        if longer is not None:
            span = steps.first, steps.until
            return self._lowerer.lower_between(plan, longer, rows, inputs_of(plan, member), span)
        return self._lowerer.lower(plan, inputs_of(plan, member), (steps.first, steps.until))


def _joined_of(phases: tuple[Phase, ...], taps: tuple[Tap, ...], changes: bool) -> Joined:
    """Return a loop as the tables have it; the arguments are attributes of `Joined`."""
    return Joined(phases, taps, changes, frozenset(tap.site for phase in phases for tap in phase.lowered.taps))


def _with_program(
    steps: Sequence[PlannedSteps],
    lowered: Sequence[Lowered],
    numbers: Sequence[tuple[int, ...]],
    taps: tuple[Tap, ...],
    made: InProgram,
    changes: bool,
) -> Joined:
    """Return a loop whose last steps run as a program.

    Args:
        steps: of the loop.
        lowered: what runs in the steps before the last.
        numbers: of the taps in these steps, as of `Phase`.
        taps, changes: as of `Joined`.
        made: the program.
    """
    forms = len(made.emitted.forms)
    of_program = tuple(range(len(taps), len(taps) + forms))
    if made.in_prompt is not None:
        numbers = [(len(taps) + forms,)]
    found = zip(steps, (*lowered, made.lowered), (*numbers, of_program), strict=True)
    phases = tuple(Phase(*one) for one in found)
    read = [read.path in PSEUDO for phase in phases for read in phase.steps.plan.reads]
    outside = any(read)  # taps alone need nothing of the logits that their block looks at
    joined = _joined_of(phases, taps, changes)
    return replace(
        joined,
        program=made.key,
        opens=made.emitted.steps[0],
        prompt=made.emitted.prompt,
        within=not outside or not all(read),
        outside=outside,
    )
