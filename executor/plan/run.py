"""Runs a plan's step for a batch of requests at the model's hooks, without a greenlet.

At each location the rows of all requests are gathered once, and written back once. In between, a plan whose operations stand
batching runs once for all requests (`torch.func.vmap` of the functional program). Any other plan runs the recorded operations
for each request on copies of its own rows, which are the same calls as the block itself would make: equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.model.bits import same_bits
from executor.model.items import kind_of, made_of
from executor.plan.deliver import Delivery, Mark
from executor.plan.environment import Environment
from executor.plan.ir import Carried, Plan, Read
from executor.plan.program import ProgramRun
from executor.views.view import tensor_at


@dataclass
class Member:
    """A request whose block runs as a plan.

    Args:
        environment: what its block reads.
        namespace: its block's names, which get the results.
        mark: notes a saved value, and what it is sent as (`SaveRegistry.mark`).
        mark_all: notes values that are sent as they are (`SaveRegistry.mark_all`).

    Attributes:
        left: the names and values that the last step left; `deliver` binds them.
        dropped: the names that it bound to what no plan can keep.
    """

    environment: Environment
    namespace: dict[str, Any]
    mark: Mark
    mark_all: Callable[[Sequence[Any]], None]
    left: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def deliver(self) -> None:
        """Bind the names that the last step left, before the block goes on."""
        self.namespace.update(self.left)
        self.namespace.update(self.environment.carried)
        for name in self.dropped:
            self.namespace.pop(name, None)
        self.left, self.dropped = {}, ()


class PlannedStep:
    """One step of some requests that have one plan.

    Args:
        plan: the plan; its guards hold in the step of each request.
        members: the requests, in the order of their rows.
        steps: the step of each.

    Raises:
        ValueError: a request's block reads something else than the plan was made for.
    """

    def __init__(self, plan: Plan, members: Sequence[Member], steps: Sequence[int]) -> None:
        if any(member.environment.fingerprint != plan.environment for member in members):
            raise ValueError("a plan was to run for a block that it was not made for")
        self.plan = plan
        self._members = members
        self._steps = steps
        self._next = 0
        several = len(members) > 1
        self._stacked = several and not plan.unstable and _shareable(plan, members)
        self._runs: list[ProgramRun]
        if self._stacked:
            self._runs = [ProgramRun(plan.functional, _stacked(plan, members), _shared(plan, members), len(members))]
        else:
            self._runs = [ProgramRun(plan.program, inputs_of(plan, member)) for member in members]

        if not plan.reads:  # a step in which the block asks for no location
            with torch.inference_mode(False), torch.no_grad():
                for run in self._runs:
                    run.serve(0, {})

    @property
    def batched(self) -> bool:
        """Whether the operations run once for all requests."""
        return self._stacked

    @property
    def wanted(self) -> tuple[str, str] | None:
        """The location that the step needs next, None if it needs no more."""
        if self._next == len(self.plan.reads):
            return None
        read = self.plan.reads[self._next]
        return read.path, read.kind

    def visit(
        self,
        value: Any,
        index: torch.Tensor,
        gather: Callable[[torch.Tensor, Any], torch.Tensor] = lambda tensor, path: tensor,
        scatter: Callable[[torch.Tensor, Any], torch.Tensor] = lambda tensor, path: tensor,
    ) -> Any:
        """The model is at the location that the step needs; return the value that it goes on with.

        Args:
            value: the model's value there, of the form that the plan was made for.
            index: the rows of the requests in it, one after the other: [requests * rows], int64.
            gather: makes a tensor at a path whole over the ranks.
            scatter: cuts it again.

        Raises:
            ValueError: the value has another form.
        """
        plan, number = self.plan, self._next
        read = plan.reads[number]
        self._next += 1
        count = len(self._members)
        tensors = []
        for (leaf, path), input_number in zip(read.form.leaves(), read.inputs, strict=True):
            whole = gather(tensor_at(value, path).index_select(0, index), path)
            if tuple(whole.shape[1:]) != leaf.shape or whole.dtype != leaf.dtype:
                raise ValueError(f"{read.path}.{read.kind} became {list(whole.shape)}, {whole.dtype}")
            tensors.append((input_number, whole.unflatten(0, (count, plan.rows))))
        with torch.inference_mode(False), torch.no_grad():
            for i, run in enumerate(self._runs):
                run.serve(number, {input_number: mine if self._stacked else mine[i] for input_number, mine in tensors})
        for write in (one for one in plan.writes if one.read == number):
            results = [run.result(write.output) for run in self._runs]
            made = results[0] if self._stacked else torch.stack(results)
            mine = scatter(made.flatten(0, 1), write.at)
            tensor = tensor_at(value, write.at)
            if write.mutated:
                tensor.index_copy_(0, index, mine)
            else:
                value = replaced(value, write.at, tensor.clone().index_copy_(0, index, mine))
        return value

    def finish(self) -> None:
        """The step is over: give each request what its block adds to lists, carries on and leaves."""
        for i, (member, step) in enumerate(zip(self._members, self._steps, strict=True)):
            give = Delivery(self._result_of(i), step, member.mark)
            for append in self.plan.appends:
                give.add(append, member.environment)
            leave(self.plan, member, give)

    def _result_of(self, i: int) -> Callable[[int], torch.Tensor]:
        if not self._stacked:
            return self._runs[i].result

        forms = [node.meta["val"] for node in self.plan.program.results]

        def result(output: int) -> torch.Tensor:
            # A copy, so that a tensor of one request does not keep those of all, laid out as the block's own would be.
            mine, form = self._runs[0].result(output)[i], forms[output]
            with torch.inference_mode(False), torch.no_grad():
                if 0 in form.stride():
                    return mine.clone()
                return torch.empty_strided(form.shape, form.stride(), dtype=mine.dtype, device=mine.device).copy_(mine)

        return result


class OwnStep:
    """One step of one request, on copies of its rows that are the block's own already.

    Args:
        plan: the plan; its guards hold in the step.
        member: the request.
        step: the step.
    """

    def __init__(self, plan: Plan, member: Member, step: int) -> None:
        self.plan = plan
        self._member = member
        self._run = ProgramRun(plan.program, inputs_of(plan, member))
        self._give = Delivery(self._run.result, step, member.mark)
        self._next = 0
        if not plan.reads:  # a step in which the block asks for no location
            with torch.inference_mode(False), torch.no_grad():
                self._run.serve(0, {})
            self._add(0)

    @property
    def wanted(self) -> Read | None:
        """The location that the step needs next, None if it needs no more."""
        return None if self._next == len(self.plan.reads) else self.plan.reads[self._next]

    def serve(self, value: Any) -> Any:
        """Run on from a location; return the value as the block leaves it.

        Args:
            value: the block's copies of the value there, of the form that the plan was made for. The plan changes them in place.
        """
        number = self._next
        read = self.plan.reads[number]
        self._next += 1
        mine = {
            input_number: tensor_at(value, path)
            for (_, path), input_number in zip(read.form.leaves(), read.inputs, strict=True)
        }
        with torch.inference_mode(False), torch.no_grad():
            self._run.serve(number, mine, own=True)
        self._add(number)
        for write in self.plan.writes:
            if write.read == number and not write.mutated:
                value = replaced(value, write.at, self._run.result(write.output))
        return value

    def _add(self, read: int) -> None:
        """Give lists and dicts what the block adds where it is now, and before the first location."""
        for append in self.plan.appends:
            if max(append.read, 0) == read:
                self._give.add(append, self._member.environment)

    def finish(self) -> None:
        """The step is over: leave what the block carries on and leaves."""
        leave(self.plan, self._member, self._give)


def leave(plan: Plan, member: Member, give: Delivery) -> None:
    """Leave a request what its block carries on from a step, and the names that the step leaves."""
    environment = member.environment
    for carried in plan.carried:
        if is_kept(plan, carried):
            continue
        now = give.tensor(carried.output)
        if not carried.mutated:
            # What ran apart from the model may be on the host; the next step may be the block's own, on the device.
            environment.carried[carried.name] = now.to(environment.carried[carried.name].device)
        elif now is not environment.carried[carried.name]:
            with torch.inference_mode(False), torch.no_grad():
                environment.carried[carried.name].copy_(now)
    member.left.update((name, give.value(item)) for name, item in plan.results)
    for name in plan.dropped:
        member.left.pop(name, None)
    left = {name for name, _ in plan.results}
    member.dropped = tuple(dict.fromkeys((*(name for name in member.dropped if name not in left), *plan.dropped)))


def is_kept(plan: Plan, carried: Carried) -> bool:
    """Return whether a step leaves a carried tensor as it was, which may be a saved one."""
    return not carried.mutated and plan.program.results[carried.output] is plan.program.inputs[carried.input]


def inputs_of(plan: Plan, member: Member) -> dict[int, torch.Tensor]:
    """Return a request's tensors that no location gives, by the index of the program's input."""
    environment = member.environment
    found = {carried.input: environment.carried[carried.name] for carried in plan.carried}
    for index, name in enumerate(plan.inputs):
        kind, _, number = name.partition("_")
        if kind == "const":
            found[index] = environment.constants[int(number)][1]
        elif kind == "literal":
            found[index] = plan.literals[int(number)]
    return found


def _shared(plan: Plan, members: Sequence[Member]) -> frozenset[int]:
    """Return the inputs that all requests share: literals, and constants with equal elements."""
    found = set()
    for index, name in enumerate(plan.inputs):
        kind, _, number = name.partition("_")
        if kind == "literal":
            found.add(index)
        elif kind == "const":
            first, *others = [member.environment.constants[int(number)][1] for member in members]
            if all(one is first or _equal(one, first) for one in others):
                found.add(index)
    return frozenset(found)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements, bit for bit, in the same layout."""
    return one.stride() == other.stride() and same_bits(one.detach(), other.detach())


def _shareable(plan: Plan, members: Sequence[Member]) -> bool:
    """Whether constants let the requests run in one batch.

    A number of each request's own is rounded otherwise in a batch.
    """
    shared = _shared(plan, members)
    return all(
        index in shared or members[0].environment.constants[int(name.partition("_")[2])][1].dim()
        for index, name in enumerate(plan.inputs)
        if name.startswith("const_")
    )


def _stacked(plan: Plan, members: Sequence[Member]) -> dict[int, torch.Tensor]:
    """Return the inputs of many requests, [requests, ...] each, but for shared inputs."""
    shared = _shared(plan, members)
    each = [inputs_of(plan, member) for member in members]
    return {
        index: tensor if index in shared else torch.stack([mine[index] for mine in each])
        for index, tensor in each[0].items()
    }


def replaced(value: Any, path: Iterable[object], tensor: torch.Tensor) -> Any:
    """Return a value with another tensor at a path."""
    keys = tuple(path)
    if not keys:
        return tensor
    first, rest = keys[0], keys[1:]
    if isinstance(value, dict):
        return {key: replaced(one, rest, tensor) if key == first else one for key, one in value.items()}
    items = [replaced(one, rest, tensor) if i == first else one for i, one in enumerate(value)]
    return made_of(kind_of(value), items)
