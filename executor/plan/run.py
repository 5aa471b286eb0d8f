"""Runs a plan's step for a batch of requests at the hooks of the model, with no greenlet in it.

At each location the rows of all requests are gathered once, and written back once. In between, a plan whose operations stand
batching runs once for all requests (`torch.func.vmap` of the functional program). Any other plan runs the recorded operations
for each request on copies of its own rows, which are the same calls as the block itself would make: equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from executor.model.items import kind_of, made_of
from executor.plan.environment import Environment
from executor.plan.ir import Item, Plan
from executor.views.view import tensor_at

Node = fx.Node
# Given the request's number in the batch, whether the block saved the value, and its copy at that moment.
Mark = Callable[[Any, Any], None]


@dataclass
class Member:
    """A request whose block runs as a plan.

    Args:
        environment: what its block reads.
        namespace: its block's names, which get the results.
        mark: notes a saved value, and what it is sent as (`SaveRegistry.mark`).

    Attributes:
        left: the names and values that the last step left; `deliver` binds them.
    """

    environment: Environment
    namespace: dict[str, Any]
    mark: Mark
    left: dict[str, Any] = field(default_factory=dict)

    def deliver(self) -> None:
        """Bind the names that the last step left, before the block goes on."""
        self.namespace.update(self.left)
        self.namespace.update(self.environment.carried)
        self.left.clear()


class PlannedStep:
    """One step of some requests that have one plan.

    Args:
        plan: the plan; its guards hold in the step of each request.
        members: the requests, in the order of their rows.
        steps: the step of each.
    """

    def __init__(self, plan: Plan, members: Sequence[Member], steps: Sequence[int]) -> None:
        self.plan = plan
        self._members = members
        self._steps = steps
        self._next = 0
        several = len(members) > 1
        self._stacked = several and not plan.unstable and _shareable(plan, members)
        self._runs: list[_Run]
        if self._stacked:
            self._runs = [_Run(plan.functional, plan, _stacked(plan, members), _shared(plan, members))]
        else:
            self._runs = [_Run(plan.program, plan, _inputs(plan, member)) for member in members]

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
        for (leaf, path), place in zip(read.form.leaves(), read.inputs, strict=True):
            whole = gather(tensor_at(value, path).index_select(0, index), path)
            if tuple(whole.shape[1:]) != leaf.shape or whole.dtype != leaf.dtype:
                raise ValueError(f"{read.path}.{read.kind} became {list(whole.shape)}, {whole.dtype}")
            tensors.append((place, whole.unflatten(0, (count, plan.rows))))
        with torch.inference_mode(False), torch.no_grad():
            for i, run in enumerate(self._runs):
                run.serve(number, {place: mine if self._stacked else mine[i] for place, mine in tensors})
        for write in (one for one in plan.writes if one.read == number):
            results = [run.result(write.output) for run in self._runs]
            made = results[0] if self._stacked else torch.stack(results)
            mine = scatter(made.flatten(0, 1), write.at)
            tensor = tensor_at(value, write.at)
            if write.in_place:
                tensor.index_copy_(0, index, mine)
            else:
                value = _replaced(value, write.at, tensor.clone().index_copy_(0, index, mine))
        return value

    def finish(self) -> None:
        """The step is over: give each request what its block adds to lists, carries on and leaves."""
        for i, (member, step) in enumerate(zip(self._members, self._steps, strict=True)):
            give = _Delivery(self._result_of(i), step, member.mark)
            environment = member.environment
            for append in self.plan.appends:
                container, made = environment.written[append.container], give.value(append.item)
                if append.key is None:
                    container.append(made)
                else:
                    container[give.value(append.key)] = made
            for carried in self.plan.carried:
                now = give.tensor(carried.output)
                if not carried.in_place:
                    environment.carried[carried.name] = now
                elif now is not environment.carried[carried.name]:
                    with torch.inference_mode(False), torch.no_grad():
                        environment.carried[carried.name].copy_(now)
            member.left = {name: give.value(item) for name, item in self.plan.results}

    def _result_of(self, i: int) -> Callable[[int], torch.Tensor]:
        if not self._stacked:
            return self._runs[i].result

        def result(output: int) -> torch.Tensor:
            # A copy, so that a tensor of one request does not keep those of all.
            return self._runs[0].result(output)[i].clone()

        return result


class _Delivery:
    """Makes the values that one request gets of a step."""

    def __init__(self, result: Callable[[int], torch.Tensor], step: int, mark: Mark) -> None:
        self._result = result
        self._step = step
        self._mark = mark
        self._tensors: dict[int, torch.Tensor] = {}

    def tensor(self, output: int) -> torch.Tensor:
        """Return an output, the same object each time."""
        if output not in self._tensors:
            self._tensors[output] = self._result(output)
        return self._tensors[output]

    def value(self, item: Item) -> Any:
        """Return the value of an item."""
        made: Any
        if item.kind == "tensor":
            made = self.tensor(item.output)
            if item.saved:
                self._mark(made, self.tensor(item.snapshot) if item.snapshot >= 0 else made)
            return made
        if item.kind == "number":
            assert item.number is not None
            made = item.number.of(self._step)
        elif item.kind == "value":
            made = item.value
        elif item.kind == "dict":
            made = {self.value(key): self.value(one) for key, one in zip(item.keys, item.items, strict=True)}
        else:
            made = (list if item.kind == "list" else tuple)(map(self.value, item.items))
        if item.saved:
            self._mark(made, made)
        return made


class _Run:
    """The program of a plan on its way through a step.

    Args:
        graph: the program.
        plan: the plan.
        inputs: the tensors that do not come from locations, by the index of the program's input.
        shared: of a program for many requests, the inputs that have no dimension of requests; None: for one request.
    """

    def __init__(
        self, graph: fx.Graph, plan: Plan, inputs: dict[int, torch.Tensor], shared: frozenset[int] | None = None
    ) -> None:
        self._plan = plan
        self._parts = parts_of(graph, plan)
        self._shared = shared
        self._env: dict[Node, Any] = {}
        self._batched: set[Node] = set()
        self._place(inputs)

    def _place(self, inputs: dict[int, torch.Tensor]) -> None:
        for index, tensor in inputs.items():
            node = self._parts.inputs[index]
            self._env[node] = tensor
            if self._shared is not None and index not in self._shared:
                self._batched.add(node)

    def serve(self, number: int, inputs: dict[int, torch.Tensor]) -> None:
        """Run the part of the program that follows a location."""
        self._place(inputs)
        nodes = self._parts.segments[number]
        if self._shared is None:
            for node in nodes:
                self._env[node] = _called(node, self._env)
        elif nodes:
            self._map(nodes)

    def _map(self, nodes: Sequence[Node]) -> None:
        """Run operations for all requests at once."""
        own = set(nodes)
        given = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in own))

        def run(*values: Any) -> list[torch.Tensor]:
            env: dict[Node, Any] = dict(zip(given, values, strict=True))
            for node in nodes:
                env[node] = _called(node, env)
            return [env[node] for node in kept]

        # A tuple of tensors is taken apart by the operations that follow it in the same part.
        kept = [node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        dims = tuple(0 if node in self._batched else None for node in given)
        if any(dim is not None for dim in dims):
            made = torch.func.vmap(run, in_dims=dims)(*(self._env[node] for node in given))
            self._batched.update(kept)
        else:
            made = run(*(self._env[node] for node in given))
        self._env.update(zip(kept, made, strict=True))

    def result(self, output: int) -> torch.Tensor:
        """Return an output; of many requests, with a first dimension for them."""
        node = self._parts.results[output]
        tensor: torch.Tensor = self._env[node]
        if self._shared is not None and node not in self._batched:
            return tensor.expand(self._count(), *tensor.shape)
        return tensor

    def _count(self) -> int:
        node = self._parts.inputs[self._plan.reads[0].inputs[0]]
        return int(self._env[node].shape[0])


def _called(node: Node, env: dict[Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, env.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


@dataclass(frozen=True)
class Parts:
    """A program cut at the locations.

    Attributes:
        inputs: its inputs, in order.
        segments: for each location, the operations that need it and no later one; the first also has what needs none.
        results: the nodes that give the outputs.
    """

    inputs: list[Node]
    segments: list[list[Node]]
    results: list[Node]


def parts_of(graph: fx.Graph, plan: Plan) -> Parts:
    """Cut a program at the locations of its plan.

    Operations keep their order. An operation in place comes with those before it, so the recorded program is cut at the first
    operation that needs a location.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    at = {inputs[index]: number for number, read in enumerate(plan.reads) for index in read.inputs}
    ordered = graph is plan.program
    segments: list[list[Node]] = [[] for _ in plan.reads]
    place: dict[Node, int] = dict.fromkeys(inputs, 0) | at
    now = 0
    results: list[Node] = []
    for node in graph.nodes:
        if node.op == "call_function":
            needs = max((place[one] for one in node.all_input_nodes), default=0)
            now = max(now, needs)
            place[node] = now if ordered else needs
            segments[place[node]].append(node)
        elif node.op == "output":
            results = list(node.args[0])
    return Parts(inputs, segments, results)


def _inputs(plan: Plan, member: Member) -> dict[int, torch.Tensor]:
    """Return a request's tensors that do not come from locations, by the index of the program's input."""
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
    """Return the inputs that are the same for all requests: literals, and constants with the same elements."""
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
    return (
        bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))
        if (one.dim())
        else bool(torch.equal(one, other))
    )


def _shareable(plan: Plan, members: Sequence[Member]) -> bool:
    """Whether constants let the requests run together: a number of each request's own is rounded otherwise in a batch."""
    shared = _shared(plan, members)
    return all(
        index in shared or members[0].environment.constants[int(name.partition("_")[2])][1].dim()
        for index, name in enumerate(plan.inputs)
        if name.startswith("const_")
    )


def _stacked(plan: Plan, members: Sequence[Member]) -> dict[int, torch.Tensor]:
    """Return the inputs of many requests: [requests, ...] each, but for those that all have in common."""
    shared = _shared(plan, members)
    each = [_inputs(plan, member) for member in members]
    return {
        index: tensor if index in shared else torch.stack([mine[index] for mine in each])
        for index, tensor in each[0].items()
    }


def _replaced(value: Any, path: Iterable[object], tensor: torch.Tensor) -> Any:
    """Return a value with another tensor at a path."""
    keys = tuple(path)
    if not keys:
        return tensor
    first, rest = keys[0], keys[1:]
    if isinstance(value, dict):
        return {key: _replaced(one, rest, tensor) if key == first else one for key, one in value.items()}
    items = [_replaced(one, rest, tensor) if i == first else one for i, one in enumerate(value)]
    return made_of(kind_of(value), items)
