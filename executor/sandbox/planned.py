"""Runs steps of a sandboxed block in the worker, as a plan that its process has made.

The block stays parked in its loop. At each location the plan gets copies of the request's own rows, and what it changes goes back
as a block's changes do. What the steps leave for the block is kept here, and sent to the process when the loop comes to its last
step, when it becomes too much, and when the block itself has to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.block.state import BlockState
from executor.core.location import COMPUTED, Kind, Location
from executor.core.text import clip
from executor.model.read_only import ReadOnly
from executor.model.shapes import Shapes
from executor.model.tree import ModuleTree
from executor.model.values import Fixed, Served
from executor.plan.forms import Form
from executor.plan.plain import Unfit
from executor.plan.portable import PortablePlan, made_of
from executor.plan.program import ProgramRun
from executor.plan.run import replaced
from executor.sandbox.channel import Kind as Question
from executor.sandbox.process import Lost
from executor.views.view import tensor_at

MOST_BYTES = 64 << 20  # of the constants of a block's plan
_LONGEST_REASON = 600  # characters
_MOST_OFFERS = 8  # plans of one block
_MOST_WAITING_BYTES = 16 << 20  # of what steps left that the block does not have
_MOST_WAITING_STEPS = 256

# Asks the process something of the block, as of `SandboxRunner`.
Ask = Callable[[Question, dict[str, Any]], dict[str, Any]]


class Room:
    """What the plans of all sandboxed blocks of one worker may take.

    Args:
        most_bytes: constants, results of a step, and what steps left, together.

    Attributes:
        most_bytes: as given.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._left = most_bytes

    def take(self, size: int) -> bool:
        """Take so many bytes; return whether there were as many."""
        fits = size <= self._left
        self._left -= size if fits else 0
        return fits

    def give(self, size: int) -> None:
        """Give bytes back."""
        self._left += size


class PlannedSteps:
    """The steps of one block that run as a plan.

    Size: a plan, where its step is, and what its steps left.

    Args:
        state: the block's state.
        tree: the model's modules.
        ask: asks the process.
        room: what the plans of all blocks may take; None: no step runs as a plan.

    Attributes:
        running: whether the plan is in a step.
    """

    def __init__(self, state: BlockState, tree: ModuleTree, ask: Ask, room: Room | None) -> None:
        self.running = False
        self._state = state
        self._tree = tree
        self._ask = ask
        self._room = room
        self._taken = 0
        self._forms: dict[tuple[str, str], Form] = {}
        self._offers = 0
        self._why = ""  # why no step runs as a plan any more
        self._plan: PortablePlan | None = None
        self._until = 0
        self._onward: dict[int, torch.Tensor] = {}
        self._run: ProgramRun | None = None
        self._next = 0  # the number of the location that the step needs next
        self._first = 0  # the first step whose outputs wait here
        self._ran = 0
        self._every: dict[int, list[torch.Tensor]] = {}
        self._last: dict[int, torch.Tensor] = {}
        self._bytes = 0

    @property
    def over(self) -> bool:
        """Whether no step runs as a plan any more."""
        return self._plan is None and (self._room is None or bool(self._why))

    def see(self, served: Served) -> None:
        """Note the form of what the block is served in a step of its own, after the first step."""
        at = self._state.waits.location
        if self._room is None or self._why or at is None or at.step == 0 or at.kind in COMPUTED:
            return
        key = (str(at.path), str(at.kind))
        if key not in self._forms and not isinstance(served, Fixed | ReadOnly | Shapes):
            self._forms[key] = Form.of_copies(served.value)

    def begin(self, step: int) -> bool:
        """Begin a step as a plan; return whether there is one.

        Raises:
            Lost: the process sent no plan, or is gone.
            Refusal: a question to it is too large.
        """
        if self._room is None or step == 0:
            return False
        plan, ends = self._plan, step >= self._until
        if plan is not None and (ends or not plan.holds(step)):
            self.land()
            plan = None
            if ends:  # the code after the loop goes on in the loop's last step
                return False
        if plan is None and not self._why:
            plan = self._offered(step)
        if plan is None:
            self._state.record.tally.why = self._why or self._state.record.tally.why
            return False
        if not self._ran:
            self._first = step
        self._run = ProgramRun(plan.parts, {**plan.fixed, **self._onward})
        self._next = 0
        self.running = True
        self._state.ran("plan")
        self._go_on()
        return True

    def _offered(self, step: int) -> PortablePlan | None:
        """Ask the process for a plan; return None if there is none for this step."""
        assert self._room is not None
        self._offers += 1
        answer = self._ask(Question.PLAN, {"most_bytes": MOST_BYTES})
        if set(answer) != {"plan", "until", "why", "later"} or not isinstance(answer["why"], str):
            raise Lost("it sent no plan")
        told, until = answer["plan"], answer["until"]
        if told is None:
            if answer["later"] is not True or self._offers >= _MOST_OFFERS:
                self._why = clip(answer["why"])[:_LONGEST_REASON] or "no plan"
            return None
        if type(until) is not int or not step < until < 1 << 40:
            raise Lost("it sent a plan without steps")
        try:
            plan = made_of(told, self._form_of(), self._tree.device, MOST_BYTES)
        except Unfit as unfit:
            raise Lost(f"it sent what is no plan: {unfit}") from None
        if not plan.holds(step):
            raise Lost("it sent a plan for other steps")
        waiting = min(plan.kept + _MOST_WAITING_BYTES, plan.kept * _MOST_WAITING_STEPS)
        size = plan.size + 2 * waiting  # which are put together before they are sent
        if not self._room.take(size):
            self._why = "the plans of other blocks take all of their memory"
            return None
        if self._offers >= _MOST_OFFERS:
            self._why = "the number of the step decides between too many programs"
        self._taken, self._plan, self._until = size, plan, until
        self._onward = dict(plan.begins)
        return plan

    def _form_of(self) -> Callable[[str, str], Form | None]:
        """Return what gives the forms of the locations of a plan, one after the other."""
        before = -1

        def form_of(path: str, kind: str) -> Form | None:
            nonlocal before
            form = self._forms.get((path, kind))
            if form is None:
                return None
            at = self._tree.order_of(path, kind)
            if at <= before:
                raise Unfit("its locations are not in the order of the model")
            before = at
            return form

        return form_of

    def _go_on(self) -> None:
        """Wait for what the step needs next, or for the next step."""
        plan, run = self._plan, self._run
        assert plan is not None and run is not None
        state = self._state
        step = state.progress.step
        if self._next < len(plan.reads):
            read = plan.reads[self._next]
            state.waits.location = Location(read.path, Kind(read.kind), step)
            return
        with torch.inference_mode(False), torch.no_grad():
            self._keep(plan, run)
        self.running, self._run = False, None
        state.waits.location = Location("", Kind.STEP, step + 1)

    def _keep(self, plan: PortablePlan, run: ProgramRun) -> None:
        """Keep what a step left."""
        for output in plan.every:
            value = _own(run.result(output))
            self._bytes += value.numel() * value.element_size()
            self._every.setdefault(output, []).append(value)
        self._last = {output: _own(run.result(output)) for output in plan.last}
        self._onward = {**self._onward, **{number: _own(run.result(output)) for number, output in plan.carried}}
        self._ran += 1

    def serve(self, served: Served) -> Exception | None:
        """Run on from a location; the changes are in `served` afterwards.

        Returns:
            What an operation raised, which the block raises where it waits.

        Raises:
            Lost: the process is gone.
            Refusal: what the steps left is too large.
        """
        try:
            self._serve(served)
        except Exception as error:
            return error
        self._go_on()
        if not self.running and (self._bytes > _MOST_WAITING_BYTES or self._ran >= _MOST_WAITING_STEPS):
            self._send(over=False)
        return None

    def _serve(self, served: Served) -> None:
        plan, run = self._plan, self._run
        assert plan is not None and run is not None
        number = self._next
        read = plan.reads[number]
        self._next += 1
        value, inputs = served.value, dict[int, torch.Tensor]()
        with torch.inference_mode(False), torch.no_grad():
            for (leaf, path), index in zip(read.form.leaves(), read.inputs, strict=True):
                tensor = tensor_at(value, path)
                if tuple(tensor.shape) != (1, *leaf.shape) or tensor.dtype != leaf.dtype:
                    raise ValueError(f"{read.path}.{read.kind} became {list(tensor.shape)}, {tensor.dtype}")
                inputs[index] = tensor.clone()
            run.serve(number, inputs)
            after = value
            for write in (one for one in plan.writes if one.read == number):
                made = run.result(write.output)
                if write.mutated:
                    tensor_at(value, write.at).copy_(made)
                else:
                    after = replaced(after, write.at, _own(made))
        if after is not value:
            served.assign(after)

    def land(self) -> None:
        """The block itself goes on: give it what the steps left. It waits for the next step then.

        Raises:
            Lost: the process is gone.
            Refusal: what the steps left is too large.
        """
        self.running, self._run = False, None
        if self._plan is not None:
            self._send(over=True)
            self.drop()

    def drop(self) -> None:
        """Forget the plan, and what its steps left."""
        self.running, self._run, self._plan = False, None, None
        self._every, self._last, self._onward = {}, {}, {}
        self._ran = self._bytes = 0
        if self._room is not None:
            self._room.give(self._taken)
        self._taken = 0

    def _send(self, over: bool) -> None:
        """Send the process what steps left."""
        told = {
            "first": self._first,
            "ran": self._ran,
            "every": {output: torch.stack(values).cpu() for output, values in self._every.items()},
            "last": {output: value.cpu() for output, value in self._last.items()} if self._ran else {},
            "over": over,
        }
        self._first, self._ran, self._bytes, self._every = self._first + self._ran, 0, 0, {}
        if self._ask(Question.LAND, told) != {"landed": True}:
            raise Lost("it did not take what its steps left")


def _own(tensor: torch.Tensor) -> torch.Tensor:  # any shape
    """Return a tensor that keeps no larger memory than its own."""
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
