"""Plans as programs between the modules of the model, for all rows of a step at once.

A plan that the tables have no taps for can be a program: an autoencoder, a probe, a carried sum, a change that is computed from
several locations. Requests whose plans and large constants are equal share a program, and each has its own
small constants. A graph is captured for a batch size and the programs of the batch, by their keys; within these, requests join
and leave without a capture.

A request joins in two steps. `Programs.join` gives it its constants, and says what the program leaves in each step; `Tables.join`
gives it room for that, and opens and closes the program with the request's steps.

What elementwise programs give has the bits of the block's own run. A product with a matrix, a norm, or another operation of
`Hoisted.unstable` may be off in the last bits, as such operations are whenever a batch has another size.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from executor.graphs.by_rows import ByRows
from executor.graphs.constants import Constant, Constants
from executor.graphs.emitted import Emitted
from executor.graphs.extents import Full
from executor.graphs.hoist import Hoisted, hoist
from executor.graphs.in_prompt import InPrompt
from executor.graphs.limits import GraphLimits
from executor.graphs.lower import outputs_of
from executor.graphs.operations import Refused
from executor.graphs.passes import Program, emitted_at, hooked, try_out
from executor.graphs.tables import Tables
from executor.graphs.template import Lowered
from executor.model.items import Path
from executor.model.tree import PSEUDO
from executor.plan.environment import Environment
from executor.plan.ir import Plan

# Whether the tensor at a path of a location is spread over ranks.
Spread = Callable[[str, str, Path], bool]


@dataclass(frozen=True)
class InProgram:
    """A plan of a request that runs as a program.

    Attributes:
        key: the program's, for `executor.graphs.cache.Key.plans`.
        emitted: for `Tables.join`.
        lowered: what the program leaves, as of a plan without taps. What a step carries on is part of it: it is read from the
            step itself, because more steps may have run than the request has tokens.
        in_prompt: what it leaves in the prompt's step; None: it does not run there.
        unstable: the first operation whose last bits may differ from those of the block's own run; "" if there is none.
    """

    key: str
    emitted: Emitted
    lowered: Lowered
    in_prompt: Lowered | None
    unstable: str


@dataclass
class _Sorted:
    """The inputs of a program that are constants, of one request.

    Attributes:
        fixed: what depends on the plan alone.
        shared: what requests with equal contents share.
        own: what the request has for itself.
    """

    fixed: dict[int, torch.Tensor]
    shared: dict[int, torch.Tensor]
    own: dict[int, torch.Tensor]

    @property
    def forms(self) -> tuple[tuple[int, tuple[int, ...], torch.dtype], ...]:
        return tuple((index, tuple(one.shape), one.dtype) for index, one in sorted(self.own.items()))

    @property
    def common(self) -> dict[int, torch.Tensor]:
        """The inputs that all requests of the program have in common, of any shape."""
        return {**self.fixed, **self.shared}


@dataclass(eq=False)
class _Held:
    """A program, with its shared constants and the slots that use it."""

    program: Program
    constants: list[Constant]
    slots: set[int]
    unstable: str


class Programs:
    """The programs of one worker.

    Args:
        modules: the model's modules by path.
        tables: which request is where, and the output.
        limits: the bounds.
        spread: says which tensors are spread over ranks.
        dropped: called with the key of a program that is gone, so that its graphs go too.
        origin: as of `Constants`.

    Attributes:
        made: how many programs were made.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        tables: Tables,
        limits: GraphLimits,
        spread: Spread = lambda path, kind, at: False,
        dropped: Callable[[str], None] = lambda key: None,
        origin: Callable[[torch.Tensor], Hashable] = lambda tensor: None,
    ) -> None:
        self._modules = modules
        self._tables = tables
        self._limits = limits
        self._spread = spread
        self._dropped = dropped
        self._constants = Constants(origin)
        self._held: OrderedDict[tuple[object, ...], _Held] = OrderedDict()  # the last used at the end
        self._by_key: dict[str, _Held] = {}
        self._of_slot: dict[int, _Held] = {}
        self._hoisted: OrderedDict[str, Hoisted | Refused] = OrderedDict()
        self._alike: set[str] = set()  # plans that run only where all constants are equal
        self.made = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._of_slot

    def join(
        self,
        slot: int,
        tenant: str,
        plan: Plan,
        environment: Environment,
        steps: tuple[int, int],
        prompt: ByRows | None = None,
    ) -> InProgram:
        """Give a request a program and its constants there.

        The copies run on the current stream, which must be ordered before the next step. A large constant and a new program wait
        for the device.

        Args:
            slot: the request's.
            tenant: whose share of the memory a new program takes.
            plan: the plan; its guards hold in all of the steps.
            environment: what the request's block reads.
            steps: the first step and the step after the last.
            prompt: if the first is a prompt's step of several rows: the rows for which the plan runs there.

        Raises:
            Refused: the plan cannot run for several rows at once, or reads what no module gives.
            Full: there is no room. Nothing of it stays.
        """
        if slot in self._of_slot or not 0 <= slot < self._tables.slots:
            raise ValueError(f"slot {slot} is taken, or none")
        hoisted = self._hoisted_of(plan)
        if prompt is not None and (hoisted.outside or hoisted.states):
            raise Refused("the program carries tensors from step to step, or is at the logits or the samples")
        try:
            values, known = hoisted.computed(environment)
            held, own = self._found(hoisted, values, environment, tenant)
        except torch.OutOfMemoryError as error:
            raise Full("the device", 0) from error
        except RuntimeError as error:
            raise Refused(f"the block's constants cannot be computed ({error})") from error
        program = held.program
        with torch.inference_mode(False), torch.no_grad():
            for index, tensor in program.stacked.items():
                tensor[slot].copy_(own[index])
            for name, state in program.states.items():
                state[slot].copy_(environment.carried[name])
        held.slots.add(slot)
        self._of_slot[slot] = held
        forms = hoisted.forms
        emitted = Emitted(program.number, steps, forms, None if prompt is None else (prompt.first, prompt.after))
        at = {output: i for i, group in enumerate(hoisted.emitted) for output in group}
        reads = {output: (i, forms[i][0]) for output, i in at.items()}
        in_prompt = None if prompt is None else InPrompt.of(prompt, at, forms, known, self._tables.output.dtype)
        return InProgram(program.key, emitted, Lowered((), reads, known), in_prompt, held.unstable)

    def leave(self, slot: int) -> None:
        """Take a request out of its program, which stays for other requests while there is room."""
        self._of_slot.pop(slot).slots.discard(slot)

    @contextmanager
    def hooked(self, keys: Iterable[str], only: torch.Tensor | None = None) -> Iterator[None]:
        """Return a context in which the model runs some programs between its modules.

        Args:
            keys: the programs.
            only: int64 [some rows], the rows that they run for; None: for all rows, as in a graph.
        """
        with hooked([self._by_key[key].program for key in sorted(keys)], self._modules, self._tables, only):
            yield

    def program_of(self, key: str) -> Program:
        """Return a program by its key."""
        return self._by_key[key].program

    @contextmanager
    def unchanged(self, keys: Iterable[str]) -> Iterator[None]:
        """Return a context for a step that runs twice: programs carry on from before it afterwards."""
        states = [state for key in keys for state in self._by_key[key].program.states.values()]
        before = [state.clone() for state in states]
        try:
            yield
        finally:
            for state, kept in zip(states, before, strict=True):
                state.copy_(kept)

    @property
    def used(self) -> int:
        """The bytes that all programs take."""
        return sum(held.program.size for held in self._held.values()) + self._constants.used

    def _hoisted_of(self, plan: Plan) -> Hoisted:
        content = _content(plan)
        found = self._hoisted.get(content)
        if found is None:
            try:
                self._check(plan)
                found = hoist(plan, content)
            except Refused as refused:
                found = refused
            self._note(content, found)
        self._hoisted.move_to_end(content)
        if isinstance(found, Refused):
            raise Refused(*found.args)
        return found

    def _note(self, content: str, hoisted: Hoisted | Refused) -> None:
        self._hoisted[content] = hoisted
        if len(self._hoisted) > 4 * self._limits.programs:
            self._alike.discard(self._hoisted.popitem(last=False)[0])

    def _check(self, plan: Plan) -> None:
        for read in plan.reads:
            if read.path not in self._modules and read.path not in PSEUDO:
                raise Refused(f"{read.path}.{read.kind} is outside of the model's pass")
            for _, path in read.form.leaves():
                if self._spread(read.path, read.kind, path):
                    raise Refused(f"{read.path}.{read.kind} is spread over ranks")

    def _sorted(self, hoisted: Hoisted, values: Mapping[int, torch.Tensor], alike: bool) -> _Sorted:
        """Tell the constants that requests share from those of each request's own, of any shape.

        A number keeps the rounding of a number only where it is on the device with the rows: there torch rounds it to their
        dtype, in a batch too. Else it is part of the program.
        """
        device, dtype = self._tables.output.device, self._tables.output.dtype
        found = _Sorted({}, {}, {})
        for index, value in values.items():
            number = value.dim() == 0 and (value.device != device or (device.type == "cpu" and value.dtype != dtype))
            large = value.numel() * value.itemsize > self._limits.shared_bytes
            placed = value if value.dim() == 0 and index not in hoisted.put else value.to(device)
            if index not in hoisted.own:
                found.fixed[index] = placed
            elif alike or number or large:
                found.shared[index] = placed
            else:
                found.own[index] = placed
        return found

    def _found(
        self, hoisted: Hoisted, values: Mapping[int, torch.Tensor], environment: Environment, tenant: str
    ) -> tuple[_Held, Mapping[int, torch.Tensor]]:
        """Return the program for a request, and the constants of its own, of any shape.

        A program that cannot have constants of each request's own is tried with equal constants for all.
        """
        while True:
            alike = hoisted.content in self._alike
            given = self._sorted(hoisted, values, alike)
            constants = {index: self._constants.find(value) for index, value in given.shared.items()}
            numbers = tuple(one.number for _, one in sorted(constants.items()) if one is not None)
            held = self._held.get((hoisted.content, given.forms, numbers)) if all(constants.values()) else None
            if held is not None:
                self._held.move_to_end((hoisted.content, given.forms, numbers))
                return held, given.own
            try:
                return self._made(hoisted, given, environment, tenant), given.own
            except Refused as refused:
                if alike or not given.own:
                    self._note(hoisted.content, refused)  # so that it is not tried for each request
                    raise
                self._alike.add(hoisted.content)

    def _made(self, hoisted: Hoisted, given: _Sorted, environment: Environment, tenant: str) -> _Held:
        device, slots = self._tables.output.device, self._tables.slots + 1
        states = {index: environment.carried[name].to(device) for name, index in hoisted.states.items()}
        crossing = {node: node.meta["val"] for node in hoisted.crossing}
        each = sum(map(_size, (*given.own.values(), *states.values(), *crossing.values())))
        self._make_room(tenant, each * slots + sum(map(_size, given.common.values())))
        try_out(hoisted, given.common, given.own, states, device)

        def room(one: torch.Tensor) -> torch.Tensor:  # [...] -> [slots + 1, ...]
            return torch.zeros((slots, *one.shape), dtype=one.dtype, device=device)

        with torch.inference_mode(False), torch.no_grad():
            stacked = {i: room(one) for i, one in given.own.items()}
            carry = {name: room(states[i]) for name, i in hoisted.states.items()}
            cross = {node: room(one) for node, one in crossing.items()}
            fixed = {i: one.clone() for i, one in given.fixed.items()}
        constants = self._taken(given.shared)
        common = fixed | {i: one.tensor for i, one in constants.items()}
        self.made += 1
        key, at = f"{hoisted.content[:16]}.{self.made}", emitted_at(hoisted, self._tables.output.dtype)
        program = Program(self.made, key, hoisted, common, stacked, carry, tenant, cross, at)
        numbers = tuple(one.number for _, one in sorted(constants.items()))
        held = _Held(program, list(constants.values()), set(), hoisted.unstable(frozenset(given.common)))
        self._held[hoisted.content, given.forms, numbers] = held
        self._by_key[program.key] = held
        return held

    def _taken(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, Constant]:
        """Return shared constants with the contents of tensors, [...], for one more user."""
        found: dict[int, Constant] = {}
        try:
            for index, tensor in tensors.items():
                found[index] = self._constants.find(tensor) or self._constants.add(tensor)
                found[index].users += 1
        except BaseException:
            for constant in found.values():
                self._constants.drop(constant)
            raise
        return found

    def _make_room(self, tenant: str, size: int) -> None:
        """Drop programs without requests until there is room for so many bytes.

        The program that was used longest ago goes first.

        Raises:
            Full: there is none.
        """
        limits = self._limits
        share = int(limits.program_bytes * limits.program_share)

        def mine() -> int:
            held = [one for one in self._held.values() if one.program.tenant == tenant]
            shared = {constant.number: constant.size for one in held for constant in one.constants}
            return sum(one.program.size for one in held) + sum(shared.values())

        while True:
            crowded = len(self._held) >= limits.programs or self.used + size > limits.program_bytes
            if not crowded and mine() + size <= share:
                return
            idle = [
                key for key, one in self._held.items() if not one.slots and (crowded or one.program.tenant == tenant)
            ]
            if not idle:
                raise Full("the memory of programs", size)
            self._drop(idle[0])

    def _drop(self, content: tuple[object, ...]) -> None:
        held = self._held.pop(content)
        del self._by_key[held.program.key]
        for constant in held.constants:
            self._constants.drop(constant)
        self._dropped(held.program.key)


def _content(plan: Plan) -> str:
    """Return what stands for a plan's operations, and for what becomes of their results."""
    text = repr((plan.key, plan.writes, plan.carried, sorted(set(outputs_of(plan)))))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _size(tensor: torch.Tensor) -> int:  # any shape
    return tensor.numel() * tensor.itemsize
