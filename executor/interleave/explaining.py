"""Explanations: a block runs on shapes, and each of its loops is tried in every tier.

The block's own code runs up to a loop, so that the loop is judged with the names that it reads. What the loop would be is
decided by the same code that decides for a trace: `executor.plan.compile` and `executor.graphs.lower`. A tensor of the model has
no elements here; a plan depends on none. Code before a loop that depends on elements ends the block; the loops after it are
judged by their text.

Size: the block's run on shapes, and what is said of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from executor.block.fiber import run_as
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.runner import Runner
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.errors import BudgetExceeded
from executor.core.location import Kind
from executor.core.text import clip
from executor.graphs import operations
from executor.graphs.by_rows import by_rows
from executor.graphs.hoist import hoist
from executor.graphs.loops import TableLoops
from executor.graphs.lower import SiteKey, lower
from executor.graphs.operations import ALL
from executor.graphs.table_loop import PlannedSteps, Window
from executor.interleave.planned import (
    GRAPHS_OFF,
    PLANS_OFF,
    RECORDS,
    SKIPS,
    STATE,
    PlannedText,
)
from executor.interleave.spans_of_steps import held, window_of
from executor.model.items import Path
from executor.model.meta_tensors import is_fake, needs_elements
from executor.model.tree import PSEUDO, ModuleTree
from executor.model.values import Served
from executor.plan.compile import Context
from executor.plan.eligible import Region, regions
from executor.plan.explain import Explanation, as_it_is, explain_region
from executor.plan.forms import Form
from executor.plan.ir import Plan
from executor.plan.refuse import Refused
from executor.plan.run import Member, inputs_of
from executor.plan.source import source_of
from interpose.v1 import trace_pb2 as pb

MOST_PARTS = 64
MOST_LOCATIONS = 256  # that a part names
LONGEST = 600  # of each text of a part
_DEEPEST = 8
_TRIES = 3  # steps in which a loop is tried that may be a plan later

ORDER = ("block", "plan", "graph")  # from the slowest tier to the fastest
NO_LOOP = "a block without a loop over steps runs as it is, in the step of the prompt"
NEW_LENGTH = (
    "the prompt's step is planned when the block comes with its length for the second time, or between other lengths"
)
AS_IT_IS = "line {}: the step of the prompt runs as it is: {}"
IN_SEGMENTS = "what runs as it is runs between segments of captured graphs, once its steps ask for the same locations"
BY_TEXT = "the block did not come to this loop on shapes alone, so that only its text was looked at"
LEAVES_OUT = "the loop is not over consecutive steps of a slice, so that it stays out of the tables"
ONE_STEP = "the last step of a loop is the block's own, and this loop has no other"
NO_TABLES = "the model has no tables: it is on pipeline stages or several ranks, or has adapters"
IN_FUNCTION = "the loop over steps is not at the top of the block"
FROM_CACHE = "the block asks for none of its prompt's rows, so that the prompt may come from the engine's prefix cache"
BUT_LAST = (
    "the block asks for none of its prompt's rows but the last {}, so that what is before may come from the engine's "
    "prefix cache"
)
AT_TOP = "write the loop at the top of the block"
ALL_STEPS = "go through all steps from a to b, tracer.iter[a:b], and ask for the step in the loop: if step % 2 == 0"


@dataclass(frozen=True)
class Facts:
    """What a worker knows of the tiers of blocks.

    Attributes:
        tree: the model's modules.
        forms: of the locations' values for one row, whole over the ranks, by path and kind.
        sites: where taps can be, by key; empty where the model has no tables.
        plans, graphs: whether blocks run as plans, and in the tables.
        loops: the loops in the tables; None: none is.
        spread: whether a rank holds a part of the tensor at a path of a location.
        segments: whether blocks that run as they are have segments of captured graphs.
        alone: whether there is one rank, so that blocks start before the prompt's step.
    """

    tree: ModuleTree
    forms: Mapping[tuple[str, str], Form]
    sites: Mapping[SiteKey, int]
    plans: bool
    graphs: bool
    loops: TableLoops | None = None
    spread: Callable[[str, str, Path], bool] = lambda path, kind, at: False
    segments: bool = False
    alone: bool = True

    @property
    def notes(self) -> list[str]:
        """What holds for all blocks."""
        if not self.plans:
            return [f"{PLANS_OFF}: blocks run as they are"]
        return [] if self.graphs else [f"{GRAPHS_OFF}: no loop runs in a graph"]

    def tier(self, best: str) -> str:
        """Return the tier that a part has whose best tier is given."""
        most = 0 if not self.plans else 1 if not self.graphs else 2
        return ORDER[min(most, ORDER.index(best))]

    def why_no_graph(self, plan: Plan, member: Member, window: Window | None, rows: int = 1) -> tuple[str, int, str]:
        """Return why a loop cannot be in the tables, the line, and what to write instead.

        The texts are "" and the line is 0 where there are none.

        Args:
            plan, member: of the loop.
            window: its steps; None if they are no consecutive steps.
            rows: of the request in the first of them.
        """
        if window is None:
            return LEAVES_OUT, 0, ALL_STEPS
        if window.until <= window.first:
            return ONE_STEP, 0, ""
        if not self.sites and self.loops is None:
            return NO_TABLES, 0, ""
        window = held(plan, window)
        steps = (window.first, window.until)
        why = (
            self._refusal(plan, member, steps)
            if self.loops is None
            else self.loops.why_not("", [PlannedSteps(plan, *steps)], member, rows)
        )
        return why, line_of(why, plan) if why else 0, ""

    def prompt_as_rows(self, prompt: Plan, plan: Plan, member: Member, until: int, rows: int) -> bool:
        """Return whether the program of a loop's later steps runs in the prompt's step too.

        Args:
            prompt: the plan for the prompt's step.
            plan, member: for the steps after it.
            until: the step after the loop's last one.
            rows: of the prompt.
        """
        if self.loops is not None:
            steps = [PlannedSteps(prompt, 0, 1), PlannedSteps(plan, 1, until)]
            return not self.loops.why_not("", steps, member, rows)
        try:
            by_rows(prompt, plan)
        except operations.Refused:
            return False
        return True

    def _refusal(self, plan: Plan, member: Member, steps: tuple[int, int]) -> str:
        """Return why tables would not take a loop, as far as its plan says, "" if they would."""
        try:
            lower(plan, plan.functional.graph, inputs_of(plan, member), self.sites, steps, tails=True)
            return ""
        except operations.Refused:
            pass
        for read in plan.reads:
            if any(self.spread(read.path, read.kind, at) for _, at in read.form.leaves()):
                return f"{read.path}.{read.kind} is spread over ranks"
        try:
            hoist(plan, plan.key)
        except operations.Refused as refused:
            return str(refused)
        return ""


def line_of(why: str, plan: Plan) -> int:
    """Return the notebook's line that a reason of the tables is about, 0 if there is none."""
    for node in plan.program.graph.nodes:
        if node.op == "call_function" and node.meta.get("line") and str(node.target).removesuffix(".default") in why:
            return int(node.meta["line"])
    return next((read.line for read in plan.reads if f"{read.path}.{read.kind} " in why), 0)


class ExplainingRunner(Runner):
    """Runs one block on shapes, and judges its loops on the way.

    Args:
        state: the block's state.
        inner: runs the block as a greenlet.
        text: the block's text.
        bounds: what each turn is bounded by.
        facts: what the worker knows.
        last: how many of its prompt's last rows the block may ask for, where others may come from the prefix cache; None: all.
    """

    def __init__(
        self,
        state: BlockState,
        inner: GreenletRunner,
        text: PlannedText,
        bounds: Bounds,
        facts: Facts,
        last: int | None = None,
    ) -> None:
        super().__init__(state)
        self._inner = inner
        self._text = text
        self._bounds = bounds
        self._facts = facts
        self._last = last
        self._context = Context(
            facts.tree,
            lambda path, kind: facts.forms.get((path, kind)),
            run_as,
            lambda code: source_of(code, text.sources),
            text.shared,
        )
        self._regions: list[Region] | None = None
        self._found: dict[int, Explanation] = {}  # by the line of the part
        self._tries: dict[int, int] = {}
        self._prompts: dict[int, Explanation] = {}  # by the line of a loop: how the prompt's step runs
        self._of_prompt: dict[int, str] = {}  # by the line of the part: why the prompt's step is not in the tables
        self._notes = facts.notes
        self._excused = False
        state.record.explains = self

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
        cached = self._state.record.tally.cached_tokens
        return self._facts.alone and self._facts.loops is not None and not cached

    def start(self) -> None:
        if self._bounded_look(self._look_at_block):
            self._turn(self._inner.start)

    def serve(self, served: Served) -> None:
        self._turn(lambda: self._inner.serve(served))

    def resume(self, value: Any) -> None:
        self._turn(lambda: self._inner.resume(value))

    def throw(self, error: BaseException) -> None:
        self._turn(lambda: self._inner.throw(error))

    def cancel(self) -> None:
        self._inner.cancel()

    def let_go(self, do: Callable[[], object]) -> None:
        self._inner.let_go(do)

    def explanation(self) -> pb.Explanation:
        """Return what was found, when the block has ended."""
        message = pb.Explanation(invoke=self._state.identity.invoke, notes=self._notes)
        for region in self._regions or ():
            if region.kind == "prompt":
                self._found.setdefault(region.line, Explanation(region.line, "block", why=NO_LOOP))
            else:
                self._found.setdefault(region.line, Explanation(region.line, "plan", why=BY_TEXT))
        for found in sorted(self._found.values(), key=lambda one: one.line)[:MOST_PARTS]:
            message.parts.append(self._part(found))
        message.notes.extend(self._last_notes())
        if self._last is not None:
            message.notes.append(BUT_LAST.format(self._last) if self._last else FROM_CACHE)
        return message

    def _last_notes(self) -> Iterator[str]:
        """Return what holds for the prompt's step, and for what runs as it is."""
        if not self._facts.graphs or not self._facts.plans:
            return
        for line, why in self._of_prompt.items():
            if why and self._found[line].tier == "graph":
                yield clip(AS_IT_IS.format(line, why), LONGEST)
        if any(one.kind == "prompt" and self._found[one.line].tier == "graph" for one in self._regions or ()):
            yield NEW_LENGTH
        if self._facts.segments and any(one.tier == "block" for one in self._found.values()):
            yield IN_SEGMENTS

    def excuses(self, failure: pb.Failure) -> bool:
        """Return whether a failure of the block is of the explanation alone, and of no trace."""
        return self._excused

    # Its turns.

    def _turn(self, turn: Callable[[], None]) -> None:
        turn()
        if self._bounded_look(self._look) and self._inner.alive and self._settled:
            self._inner.cancel()
            self._state.ending.ended = Ended.DONE

    def _bounded_look(self, look: Callable[[], None]) -> bool:
        """Look at the block within its budget; return whether it may go on."""
        progress, failure = self._state.progress, self._state.ending.failure
        try:
            _, seconds = self._bounds.budget.run(look, progress.used, self._bounds.blame)
        except BudgetExceeded as error:
            if failure is None and (self._inner.alive or progress.step <= 0):
                self._inner.throw(error)
            return False
        progress.used += seconds
        return True

    def _look_at_block(self) -> None:
        """Judge a block of the prompt's step before it runs."""
        self._regions = self._found_regions()
        if self._regions and self._regions[0].kind == "prompt":
            [region] = self._regions
            found = self._judged(region, 0, Window(0, 0, 1), max(1, self._state.progress.prompt_tokens))
            if found.tier == "plan":  # programs at hooks are for steps after the prompt
                found = replace(found, tier="block")
            self._found[region.line] = found

    @property
    def _settled(self) -> bool:
        """Whether nothing is left to be judged."""
        loops = [one.line for one in self._regions or () if one.kind == "loop"]
        return not self._regions or (bool(loops) and all(self._tries.get(line, 0) >= _TRIES for line in loops))

    def _look(self) -> None:
        """Judge the loop where the block waits or has failed."""
        if self._regions is None:
            self._regions = self._found_regions()
        waiting, failure = self._state.waits.location, self._state.ending.failure
        if failure is not None:
            self._failed(failure)
        elif waiting is not None and waiting.kind == Kind.STEP and self._inner.loop is not None:
            loop = self._inner.loop
            region = next((one for one in self._regions if one.kind == "loop" and one.line == loop.line), None)
            if region is None:
                first = self._text.unit.first_line
                why = Explanation(first, "block", why=IN_FUNCTION, at=loop.line, instead=AT_TOP)
                self._found.setdefault(first, why)
            elif self._tries.get(region.line, 0) < _TRIES:
                self._judge(region, waiting.step, window_of(loop, self._state.progress.step + 1))

    def _failed(self, failure: pb.Failure) -> None:
        """Judge the loop in which the block failed; note whether a trace would fail too."""
        every = self._regions or []
        missing = needs_elements(failure) or "which a scan has not" in failure.message
        line = next((one.line for one in reversed(failure.frames) if one.filename == self._filename), 0)
        inside = next((one for one in reversed(every) if one.line <= line <= end_of(one)), None)
        # What stands after the last loop gets nothing of a generation, and no text means that nothing is left to be judged.
        self._excused = missing or not every or line > end_of(every[-1])
        if inside is not None and inside.kind == "loop":
            if inside.line not in self._found:
                self._judge(inside, max(1, self._state.progress.step), Window(1, 1, ALL))
        elif missing:
            self._notes.append(f"line {line} needs the elements of a tensor, and an explanation has shapes alone")

    @property
    def _filename(self) -> str:
        return self._text.unit.filename

    def _found_regions(self) -> list[Region]:
        try:
            return regions(self._text.unit)
        except Refused as refused:
            first = self._text.unit.first_line
            self._found[first] = as_it_is(first, refused)
            return []

    def _judge(self, region: Region, step: int, window: Window | None) -> None:
        if window is not None and (window.since, window.first) == (0, 0):
            rows = max(1, self._state.progress.prompt_tokens)
            found = self._judged(region, 0, replace(window, until=min(1, window.until)), rows)
            self._of_prompt[region.line] = found.why
            self._prompts[region.line] = found
            if found.why:  # the block runs the step, and the loop is tried after it
                return
            step, window = 1, replace(window, first=1)
        elif (
            self.may_start_early and window is not None and window.since == 1
        ):  # the block has asked for something before its loop
            self._of_prompt.setdefault(region.line, "the block asks for something of the model before the loop")
        found = self._judged(region, step, window)
        self._found[region.line] = self._bounded(found)
        if found.tier == "graph" and window is not None:
            self._look_at_prompt(region.line, found, window)
        self._tries[region.line] = self._tries.get(region.line, 0) + 1 if found.later else _TRIES

    def _look_at_prompt(self, line: int, found: Explanation, window: Window) -> None:
        """Judge the prompt's step of a loop again, once its later steps have been judged."""
        prompt = self._prompts.pop(line, None)
        if prompt is None or prompt.plan is None or found.plan is None or found.environment is None:
            return
        member = Member(found.environment, with_zeros(self._inner.names), lambda *_: None, lambda *_: None)
        rows = max(1, self._state.progress.prompt_tokens)
        if self._facts.prompt_as_rows(prompt.plan, found.plan, member, window.until, rows):
            self._of_prompt[line] = ""

    def _judged(self, region: Region, step: int, window: Window | None, rows: int = 1) -> Explanation:
        """Return how a part can run in a step, with so many rows of the request."""
        names, context = with_zeros(self._inner.names), self._context
        if rows > 1:
            forms = self._facts.forms

            def form_of(path: str, kind: str) -> Form | None:
                form = forms.get((path, kind))
                return form if form is None or path in PSEUDO else replace(form, rows=rows)

            context = replace(context, form_of=form_of)
        with torch.inference_mode(False), torch.no_grad():
            found = explain_region(region, names, self._text.live, step, context)
            if found.plan is not None and found.environment is not None:
                member = Member(found.environment, names, lambda *_: None, lambda *_: None)
                why, at, instead = self._facts.why_no_graph(found.plan, member, window, rows)
                found = replace(found, tier="plan" if why else "graph", why=why, at=at, instead=instead)
        return found

    def _bounded(self, found: Explanation) -> Explanation:
        """Return an explanation as far as what the block did before the loop allows."""
        record = self._state.record
        if found.tier != "block" and self._inner.holds_state:
            return Explanation(found.line, "block", why=STATE)
        if found.tier != "block" and record.skips.fingerprint():
            return Explanation(found.line, "block", why=SKIPS)
        if found.tier == "graph" and record.recorders:
            return replace(found, tier="plan", why=RECORDS)
        return found

    def _part(self, found: Explanation) -> pb.ExplainedPart:
        lines = self._text.sources.get(self._filename, {})

        def text(line: int) -> str:
            return clip(lines.get(line, "").strip(), LONGEST)

        return pb.ExplainedPart(
            line=found.line,
            text=text(found.line),
            tier=self._facts.tier(found.tier),
            best=found.tier,
            reads=found.reads[:MOST_LOCATIONS],
            writes=found.writes[:MOST_LOCATIONS],
            why=clip(found.why, LONGEST),
            at=found.at,
            at_text=text(found.at),
            instead=clip(found.instead, LONGEST),
        )


def end_of(region: Region) -> int:
    """Return the last line of a part's own code."""
    return max((line for _, _, line in region.code.co_lines() if line), default=region.line)


def with_zeros(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block's names with zeros in the places of tensors without elements."""
    made: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if id(value) in made:
            return made[id(value)]
        if is_fake(value):
            zeros = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
            return made.setdefault(id(value), zeros)
        if type(value) not in (list, tuple, dict) or not _has_fakes(value, 0):
            return value
        if type(value) is tuple:
            return made.setdefault(id(value), tuple(of(item) for item in value))
        if type(value) is dict:
            filled = made[id(value)] = {}
            filled.update({key: of(item) for key, item in value.items()})
            return filled
        items = made[id(value)] = []
        items.extend(of(item) for item in value)
        return items

    return {name: of(value) for name, value in names.items()}


def _has_fakes(value: Any, depth: int) -> bool:
    """Return whether a value holds tensors without elements, down to a depth."""
    if is_fake(value):
        return True
    if type(value) not in (list, tuple, dict) or depth > _DEEPEST:
        return False
    return any(_has_fakes(item, depth + 1) for item in (value.values() if type(value) is dict else value))
