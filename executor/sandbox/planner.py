"""Makes plans of a block's loop, in the process of the block.

To trace a loop is to run its code, so that happens here. The worker gets the plan as plain values (`executor.plan.tell`),
runs its steps, and sends back what they left. The block is parked in its loop meanwhile.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from executor.block.api import Passed
from executor.block.fiber import run_as
from executor.block.greenlet_runner import GreenletRunner
from executor.block.state import BlockState
from executor.core.location import Kind, Location
from executor.core.programs import Unit
from executor.model.tree import ModuleTree
from executor.model.values import Served
from executor.plan.compile import Context, compile_region, survey
from executor.plan.deliver import Delivery
from executor.plan.eligible import Region, regions
from executor.plan.forms import Form
from executor.plan.ir import Plan
from executor.plan.plain import Unfit
from executor.plan.portable import made_of
from executor.plan.refuse import Refused
from executor.plan.run import Member, inputs_of, leave
from executor.plan.source import source_of
from executor.plan.tell import told_of

NO_END = 1 << 31
_RANGE = type(iter(range(1)))  # the iterators of loops over a slice of steps


@dataclass(frozen=True)
class Text:
    """What plans need to know of a block's text.

    Attributes:
        unit: the text.
        sources: the user's source lines by file name.
        live: the names that the block gives back.
        shared: the names among these that other blocks see.
        why_not: why no step of the block runs as a plan, "" if steps may.
    """

    unit: Unit
    sources: Mapping[str, dict[int, str]]
    live: frozenset[str]
    shared: frozenset[str]
    why_not: str


class Planner:
    """Makes the plans of one block.

    Args:
        state: the block's state.
        runner: runs the block.
        tree: the skeleton of the model's modules.
        text: the block's text.

    Attributes:
        passed: whether steps have passed since the block parked in its loop.
    """

    def __init__(self, state: BlockState, runner: GreenletRunner, tree: ModuleTree, text: Text) -> None:
        self.passed = False
        self._state = state
        self._runner = runner
        self._text = text
        self._forms: dict[tuple[str, str], Form] = {}
        self._context = Context(
            tree,
            lambda path, kind: self._forms.get((path, kind)),
            run_as,
            lambda code: source_of(code, text.sources),
            text.shared,
        )
        self._plan: Plan | None = None
        self._member: Member | None = None

    def see(self, served: Served) -> None:
        """Note the form of what the block is served after the first step."""
        at = self._state.waits.location
        if at is None or at.step == 0 or self._text.why_not:
            return
        key = (str(at.path), str(at.kind))
        if key not in self._forms:
            self._forms[key] = Form.of_copies(served.value)

    def offer(self, most_bytes: int) -> dict[str, Any]:
        """Return a plan for the step that the block waits for, or why there is none.

        Args:
            most_bytes: bound on the constants and carried tensors.
        """
        try:
            with torch.inference_mode(False), torch.no_grad():
                plan, until = self._offered(most_bytes)
        except Refused as refused:
            return {"plan": None, "until": 0, "why": str(refused), "later": refused.later}
        except Exception as error:  # of torch's, where it traces; the block runs as it is
            return {"plan": None, "until": 0, "why": f"no plan could be made ({error})", "later": False}
        return {"plan": plan, "until": until, "why": "", "later": False}

    def _offered(self, most_bytes: int) -> tuple[dict[str, Any], int]:
        region = self._region()
        loop = self._runner.loop
        assert loop is not None
        names = self._runner.names
        environment = survey(region, names, self._context.source_of)
        registry = self._state.registry
        member = Member(environment, names, registry.mark, registry.mark_all)
        plan = compile_region(region, names, self._text.live, loop.asked, self._context)
        given = inputs_of(plan, member)
        if sum(one.numel() * one.element_size() for one in given.values()) > most_bytes:
            raise Refused(
                region.line,
                f"a sandboxed block's loop reads tensors of more than {most_bytes >> 20} MiB from before it",
                "read fewer tensors in the loop",
            )
        told = told_of(plan, given)
        forms = {(read.path, read.kind): read.form for read in plan.reads}
        try:
            made_of(told, lambda path, kind: forms.get((path, kind)), torch.device("cpu"), most_bytes)
        except Unfit as unfit:
            raise Refused(region.line, f"no plan of a sandboxed block: {unfit}") from None
        self._plan, self._member = plan, member
        return told, min(NO_END, loop.asked + operator.length_hint(loop.coming, NO_END))

    def _region(self) -> Region:
        """Return the loop where the block waits.

        Raises:
            Refused: it is no plan now.
        """
        text, runner, state = self._text, self._runner, self._state
        line = text.unit.first_line
        if text.why_not or runner.holds_state or state.record.skips.fingerprint():
            raise Refused(line, text.why_not or "the block changed a state of the process, or skips modules")
        found = [one for one in regions(text.unit) if one.kind == "loop"]
        loop = runner.loop
        found = [one for one in found if loop is not None and one.line == loop.line]
        if len(found) != 1 or loop is None:
            raise Refused(line, "the loop over steps is not at the top of the block")
        ahead = list(itertools.islice(copy.copy(loop.coming), 1)) if isinstance(loop.coming, _RANGE) else []
        if ahead != [loop.asked + 1]:
            raise Refused(found[0].line, "the loop leaves out steps, or this is its last", later=True)
        return found[0]

    def step(self) -> Passed | None:
        """Return what the block is resumed with in its loop if steps have passed without it."""
        passed, self.passed = self.passed, False
        return Passed(self._runner.loop.asked) if passed and self._runner.loop is not None else None

    def land(self, told: dict[str, Any]) -> None:
        """Give the block what steps of the plan left, as if the block had run them.

        Args:
            told: the first of the steps (`first`), how many there were (`ran`), the outputs of each by number (`every`, [steps,
                ...] each), and those of the last (`last`).
        """
        plan, member, loop = self._plan, self._member, self._runner.loop
        assert plan is not None and member is not None and loop is not None
        ran, every, last = told["ran"], told["every"], told["last"]
        with torch.inference_mode(False), torch.no_grad():
            for i in range(ran):
                values = {output: values[i].clone() for output, values in every.items()}
                if i == ran - 1:
                    values |= last
                give = Delivery(values.__getitem__, told["first"] + i, member.mark)
                for append in plan.appends:
                    give.add(append, member.environment)
                if i == ran - 1:
                    leave(plan, member, give)
        self.passed = self.passed or ran > 0
        for _ in range(ran):
            loop.asked = next(loop.coming, loop.asked)
        self._state.waits.location = Location("", Kind.STEP, loop.asked)
        if told["over"]:
            member.deliver()
            self._plan = self._member = None
