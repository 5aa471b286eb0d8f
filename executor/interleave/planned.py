"""Runs a block as a greenlet, and the steps of its loop as plans where they can be.

To the forward's side a planned step looks like any other. The block waits for the location that the plan needs next. There it is
served its own rows, and what it changed goes back by the same way (`executor.interleave.serving`). The greenlet stays parked in
the loop while plans run steps. It goes on after the loop's last step, at the end of the generation, or in a step that no plan is
for.

A loop whose plan the tables take (`executor.graphs.loops`) goes there before its first step. Its block then sees none of the
steps: the greenlet stays parked, and the machine is told that the block is away. When the loop comes back, its lists get what the
taps have read.

A block whose loop may be in the tables in the prompt's step starts before that step. It runs up to the loop and parks. If the
tables do not take the loop, the block goes on in the prompt's step, and the loop is tried again after that step.

A block without a loop is of the prompt's step. If the tables take all of it, up to where it asks for the result, then none of it
runs as a greenlet but the code from there on.

Size: a block's run in three forms: its own code, a plan's step, and a loop in the tables.

"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from executor.block.api import Passed
from executor.block.budget import Budget
from executor.block.fiber import run_as
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.runner import Runner
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.errors import BudgetExceeded, Refusal
from executor.core.location import Kind, Location
from executor.core.programs import Unit
from executor.graphs.landing import land
from executor.graphs.loops import TableLoops
from executor.graphs.lower import OTHER_LENGTH
from executor.graphs.table_loop import Left, PlannedSteps, TableLoop, Window, asks_prompt
from executor.interleave.plans import Plans
from executor.interleave.spans_of_steps import counted, held, number_of, window_of
from executor.model.values import Served
from executor.plan.compile import Context, compile_region, survey
from executor.plan.eligible import Region, regions
from executor.plan.ir import Plan
from executor.plan.refuse import Refused
from executor.plan.run import Member, OwnStep
from executor.plan.source import source_of
from interpose.v1 import trace_pb2 as pb

T = TypeVar("T")
_TRIES = 3  # steps in which a plan that may come later is tried

# Why steps run in no better tier, as a trace's accounting says it.
PLANS_OFF = "plans: false in the model's settings"
GRAPHS_OFF = "graphs: false in the model's settings, or the model is on a CPU, several GPUs or stages, or has adapters"
OUTSIDE = "the prompt's step, and code outside of a loop over steps, run as they are"
SKIPS = "the block skips modules, which the engine does for it"
STATE = "the block changed a state of the process, e.g. torch's default dtype"
RECORDS = "tracer.cache() records the steps, so that the loop stays out of the tables"
NOT_ON_ALL = "another rank could not take the same loop into its tables"
CLOSED = "the block gets none of its prompt's rows"
CHUNKED = "the prompt is longer than a step, and comes in chunks"
STREAMED = "a streamed trace, or a trace with standing edits, stays out of the tables"


@dataclass(frozen=True)
class PlannedText:
    """What plans need to know of a block's text.

    Attributes:
        unit: the text.
        sources: the user's source lines by file name.
        live: the names that the block gives back.
        shared: the names among these that other blocks see; others are given back only if they are saved.
        tenant: whose share of the tables' memory its loops take; None: they stay out of the tables.
        unseen: whether no code runs after the block's own before its names are encoded and dropped.
        learn: called when the block's loop has gone into the tables before the prompt's step; None: nothing is.
        last: how many of its prompt's last rows the block gets, where the others may come from the prefix cache; None: all.
        eager: whether the block runs as it is in the prompt's step, because it counts rows that the step has not all of.
    """

    unit: Unit
    sources: Mapping[str, dict[int, str]]
    live: frozenset[str]
    shared: frozenset[str] = frozenset()
    tenant: str | None = None
    unseen: bool = False
    learn: Callable[[Sequence[PlannedSteps], Member], None] | None = None
    last: int | None = None
    eager: bool = False


class PlannedRunner(Runner):
    """Runs one block.

    Args:
        state: the block's state.
        inner: runs the block as a greenlet.
        text: the block's text.
        bounds: what each turn is bounded by.
        plans: the worker's plans.
        adopts: the block's loop, if that went into the tables without the block (`executor.interleave.deferred`).

    Attributes:
        refused: why steps do not run as plans, None while they may.

    """

    def __init__(
        self,
        state: BlockState,
        inner: GreenletRunner,
        text: PlannedText,
        bounds: Bounds,
        plans: Plans,
        adopts: TableLoop | None = None,
    ) -> None:
        super().__init__(state)
        self._inner = inner
        self._adopts = adopts
        self._unit = text.unit
        self._text = text
        self._budget: Budget = bounds.budget
        self._blame = bounds.blame
        self._plans = plans
        self._context = Context(
            plans.tree, plans.form_of, run_as, lambda code: source_of(code, text.sources), text.shared
        )
        self._regions: list[Region] | None = None
        self._tries = 0
        self._region: Region | None = None  # the loop whose steps plans run now
        self._member: Member | None = None
        self._step: OwnStep | None = None  # the step that a plan runs now
        self._stays = GRAPHS_OFF if plans.loops is None else STREAMED if text.tenant is None else ""
        state.record.tally.why = OUTSIDE
        self.refused: Refused | None = None

    @property
    def names(self) -> dict[str, Any]:
        return self._inner.names

    @property
    def lends_names(self) -> bool:
        return self._inner.lends_names

    @property
    def alive(self) -> bool:
        return self._inner.alive

    @property
    def may_start_early(self) -> bool:
        if self._stays or self._text.eager or self._plans.several:  # ranks compare turns in steps
            return False
        try:
            self._regions = self._regions or regions(self._unit)
        except Refused:
            return False
        return True

    def start(self) -> None:
        region = self._regions[0] if self._state.progress.step < 0 and self._regions else None
        if region is not None and region.kind == "prompt" and self._enter_prompt(region):
            return
        self._inner.start()
        self._enter_tables()

    def finish(self) -> None:
        region = self._region
        if region is None or region.kind != "prompt":
            super().finish()
            return
        self._state.waits.location = None
        self._hand_back()
        if region.rest is None:
            self._state.ending.ended = Ended.DONE
        else:
            self._state.waits.result_asked = True
            self._inner = self._inner.with_code(region.rest)
            self._inner.start()

    def serve(self, served: Served) -> None:
        step = self._step
        if step is None:
            location = self._state.waits.location
            if location is not None and location.step > 0:
                self._plans.see(location, served)
            self._inner.serve(served)
            self._enter_tables()
            return
        try:
            self._bounded(lambda: served.assign(step.serve(served.value)))
        except (Exception, BudgetExceeded) as error:
            self.throw(error)
            return
        self._go_on()

    def resume(self, value: Any) -> None:
        waiting = self._state.waits.location
        if waiting is None or waiting.kind != Kind.STEP:
            self._inner.resume(value)
            self._enter_tables()
        elif value is not True or waiting.step == 0:  # plans at hooks are for one row
            self._hand_back()
            self._inner.resume(value)
            self._enter_tables()
        else:
            try:
                begun = self._begin(waiting.step)
            except BudgetExceeded as error:  # the block's own code, or a `__del__` of its objects, took too long
                self.throw(error)
                return
            if begun:
                self._go_on()
            else:
                planned = self._region is not None
                self._hand_back()
                self._inner.resume(Passed(waiting.step) if planned else True)
                self._enter_tables()

    def throw(self, error: BaseException) -> None:
        self._leave_tables()
        self._hand_back()
        self._inner.throw(error)

    def cancel(self) -> None:
        self._leave_tables()
        self._step = self._region = self._member = None
        self._inner.cancel()

    def let_go(self, do: Callable[[], object]) -> None:
        self._inner.let_go(do)

    def _begin(self, number: int) -> bool:
        """Begin a step as a plan; return whether there is one."""
        tally = self._state.record.tally
        if self.refused is not None or self._state.record.skips.fingerprint() or self._inner.holds_state:
            tally.why = str(self.refused) if self.refused is not None else STATE if self._inner.holds_state else SKIPS
            return False
        try:
            self._step = self._bounded(lambda: self._planned(number))
        except Refused as refused:
            tally.why = str(refused)
            self._tries += 1
            if not refused.later or self._tries >= _TRIES:
                self.refused = refused
        except Exception as error:  # of torch's, where it traces; the block runs as it is
            self.refused = Refused(self._unit.first_line, f"no plan could be made ({error})", "")
            tally.why = str(self.refused)
        if self._step is not None:
            self._state.ran("plan", self._stays or (RECORDS if self._state.record.recorders else ""))
        return self._step is not None

    def _planned(self, number: int) -> OwnStep:
        with torch.inference_mode(False), torch.no_grad():  # the block is resumed in the engine's inference mode
            plan = self._plan_of(number)
        assert self._member is not None
        self._plans.steps += 1
        return OwnStep(plan, self._member, number)

    def _plan_of(self, number: int, rows: int = 1) -> Plan:
        """Return the plan for a step of the loop where the block waits.

        Args:
            number: the step.
            rows: the rows of the request in the step.

        Raises:
            Refused: there is none.
        """
        region, member = self._surveyed()
        names = member.namespace
        plans, live, context = self._plans, self._text.live, self._context
        key = self._key_of(member)
        if rows == 1:
            make = functools.partial(compile_region, region, names, live, number, context)
            plan = plans.cache.get(key, number, make, region.line)
        else:
            last = self._text.last or 0
            context = replace(context, form_of=lambda path, kind: plans.form_in_prompt(path, kind, rows), last=last)
            make = functools.partial(compile_region, region, names, live, number, context)
            plan = plans.cache.of_prompt(key, rows, make, region.line)
        self._region, self._member = region, member
        return plan

    def _surveyed(self) -> tuple[Region, Member]:
        """Return the loop where the block waits, and what it reads.

        Raises:
            Refused: it is no plan.
        """
        region, member, names = self._region or self._loop(), self._member, self._inner.names
        if member is None:
            environment = survey(region, names, self._context.source_of)
            registry = self._state.registry
            member = Member(environment, names, registry.mark, registry.mark_all)
        return region, member

    def _loop(self) -> Region:
        """Return the region of the loop where the block waits.

        Raises:
            Refused: it is no plan.
        """
        if self._regions is None:
            self._regions = regions(self._unit)
        loop = self._inner.loop
        found = [one for one in self._regions if one.kind == "loop" and loop is not None and one.line == loop.line]
        if len(found) != 1:
            raise Refused(self._unit.first_line, "the loop over steps is not at the top of the block", "")
        return found[0]

    def _go_on(self) -> None:
        """Wait for what the planned step needs next, or for the next step."""
        step, waits, progress = self._step, self._state.waits, self._state.progress
        if step is None or self._member is None:
            return
        wanted = step.wanted
        if wanted is not None:
            waits.location = Location(wanted.path, wanted.kind, progress.step)
            return
        step.finish()
        self._member.deliver()
        self._step = None
        loop = self._inner.loop
        assert loop is not None
        following = next(loop.coming, None)
        if following is not None and following > progress.step:
            loop.asked = following
            waits.location = Location("", Kind.STEP, following)
            self._enter_tables()
        else:
            self._hand_back()
            self._inner.resume(Passed(following))
            self._enter_tables()

    def _enter_prompt(self, region: Region) -> bool:
        """Put a block of the prompt's step into the tables; return whether they took it."""
        loops, window, state = self._plans.loops, Window(0, 0, 1), self._state
        if loops is None or self._text.tenant is None:
            return False
        self._region = region
        try:
            with torch.inference_mode(False), torch.no_grad():
                steps = self._bounded(lambda: self._planned_steps(window))
        except BudgetExceeded as error:
            self.throw(error)
            return True
        except Exception as error:  # the block runs as it is; an error of its own then comes at its line
            why = str(error) if isinstance(error, Refused) else f"no plan could be made ({error})"
        else:
            reads = steps[0].plan.reads
            why = self._entered(loops, steps, window, once=True) if reads else "the block asks for no location"
        if why:
            self._region = self._member = None
            state.record.tally.why = why
            return False
        state.waits.away, state.waits.location = True, Location("", Kind.RESULT, 0)
        return True

    def _enter_tables(self) -> None:
        """Put the loop where the block waits for a step into the tables, if they take it."""
        waits, loop, loops = self._state.waits, self._inner.loop, self._plans.loops
        if self._adopts is not None:
            self._take_over(self._adopts)
            return
        if self._stays or self.refused is not None or loop is None or loops is None or self._text.tenant is None:
            return
        location = waits.location
        if location is None or location.kind != Kind.STEP or self._inner.holds_state:
            return
        if self._state.record.skips.fingerprint() or self._state.record.recorders:
            return
        window = window_of(loop, self._state.progress.step + 1)
        if window is None:
            self._stays = "the loop leaves out steps"
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                steps = self._bounded(lambda: self._planned_steps(window))
        except BudgetExceeded as error:
            self.throw(error)
            return
        except Exception as error:
            self._not_entered(window, error)
            return
        if not steps:
            return
        key, member = self._state.identity.request_id, self._member
        assert member is not None
        why = self._entered(loops, steps, window)
        if why and len(steps) > 1:
            why = self._entered(loops, steps[:1], window)
        waits.away = not why
        if waits.away and window.since == 0 and self._text.learn is not None and steps[0].longer is None:
            self._text.learn(steps, member)
        if waits.away and self._plans.several:  # which do not start early, so that there is one plan
            taken = Window(window.since, steps[0].first, steps[0].until)
            waits.away_as = number_of(steps[0].plan, member, (taken, loops.program_of(key)))
        if why and window.since == 0:
            self._region = self._member = None
        else:
            self._stays = why

    def _take_over(self, adopted: TableLoop) -> None:
        """Wait while the block's loop is in the tables, where it went without the block."""
        self._adopts = None
        waits = self._state.waits
        if waits.location is None or waits.location.kind != Kind.STEP:  # the block has failed
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._region, self._member = self._bounded(self._surveyed)
            fingerprint = self._member.environment.fingerprint
            if any(phase.steps.plan.environment != fingerprint for phase in adopted.phases):
                raise Refusal(pb.ERROR_CODE_ENGINE, "the block reads other values than its loop has had; run it again")
        except (Exception, BudgetExceeded) as error:
            self.throw(error)
            return
        adopted.back = self._come_back
        waits.away = True

    def _entered(self, loops: TableLoops, steps: list[PlannedSteps], window: Window, once: bool = False) -> str:
        """Put planned steps into the tables; return why they are not there, "" if they are."""
        key, tenant, member = self._state.identity.request_id, self._text.tenant, self._member
        assert member is not None and tenant is not None
        if self._text.last == 0 and asks_prompt(steps):
            return CLOSED
        try:
            rows = self._rows(window)
            why = loops.enter(key, tenant, steps, member, window.since, self._come_back, rows, once=once)
        except Exception as error:  # of torch's, which computes the block's constants
            return f"its constants could not be computed ({error})"
        if why == OTHER_LENGTH and steps[0].longer is not None:
            self._plans.cache.note_apart(steps[0].plan, steps[0].longer)
        return why

    def _not_entered(self, window: Window, error: Exception) -> None:
        """Note that no plan could be made for a loop; before the prompt's step it is left for later."""
        if window.since == 0:
            self._region = self._member = None
        elif not isinstance(error, Refused):  # of torch's, where it traces; the block runs as it is
            self.refused = Refused(self._unit.first_line, f"no plan could be made ({error})", "")
        elif not error.later:
            self.refused = error

    def _rows(self, window: Window) -> int:
        """Return the rows of the request in its next step."""
        state = self._state
        return state.progress.prompt_tokens - state.record.tally.cached_tokens if window.since == 0 else 1

    def _planned_steps(self, window: Window) -> list[PlannedSteps]:
        """Return the plans for the first steps of a window, none if it has no step.

        Raises:
            Refused: the first step has no plan.
        """
        rows = self._rows(window)
        if window.until <= window.first:
            return []
        if rows == 1 or window.first > 0:
            plan = self._plan_of(window.first)
            return [PlannedSteps(plan, window.first, held(plan, window).until)]
        steps = [self._planned_prompt(rows)]
        if window.until > 1:
            try:
                plan = self._plan_of(1)
            except Refused:
                return steps
            steps.append(PlannedSteps(plan, 1, held(plan, replace(window, first=1)).until))
        return steps

    def _planned_prompt(self, rows: int) -> PlannedSteps:
        """Return the plan for a prompt of two or more rows; raises as `_plan_of`."""
        self._region, self._member = self._surveyed()
        around = self._plans.cache.around(self._key_of(self._member), rows)
        if around is not None:
            return PlannedSteps(around[0], 0, 1, around[1])
        return PlannedSteps(self._plan_of(0, rows), 0, 1)

    def _key_of(self, member: Member) -> tuple[object, ...]:
        """Return what the plans of a region are kept under."""
        return member.environment.fingerprint, self._text.live, self._context.shared, self._text.last

    def _come_back(self, left: Left, again: bool) -> Location:
        """Go on from the tables, as of `ComeBack`."""
        state, loop, region = self._state, self._inner.loop, self._region
        assert self._member is not None and region is not None
        state.waits.away = False
        land(left, self._member, self._plans.tree.device if region.after else None, self._text.unseen)
        if region.kind == "prompt":
            location = Location("", Kind.RESULT, 0)
            if not left.ran:  # the request ends before its step
                state.waits.location = self._region = self._member = None
                return location
        else:
            assert loop is not None
            for _ in range(left.ran):
                loop.asked = next(loop.coming, loop.asked)
            location = Location("", Kind.STEP, loop.asked)
        state.waits.location = location
        state.progress.step += left.passed
        state.progress.counted = state.progress.step
        counted(left, state.record.tally)
        self._plans.steps += left.ran
        if again:
            self._enter_tables()
        return state.waits.location or location

    def withdraw(self) -> None:
        self._leave_tables()
        self._stays = NOT_ON_ALL

    def _leave_tables(self) -> None:
        if self._state.waits.away and self._plans.loops is not None:
            self._plans.loops.drop(self._state.identity.request_id)
            self._state.waits.away = False

    def _hand_back(self) -> None:
        """The block's own code goes on: its names are what the steps so far left."""
        if self._member is not None:
            self._member.deliver()
        self._step = self._region = self._member = None

    def _bounded(self, do: Callable[[], T]) -> T:
        """Run code within what the block may still take in this step."""
        progress = self._state.progress
        made, seconds = self._budget.run(do, progress.used, self._blame)
        progress.used += seconds
        return made
