"""A plan's program without the operations that need constants alone.

A block computes them in every step anew, always with the same result. They run once for each request, as the block would run
them, when the request joins; the program takes their results as inputs. So the program that runs for all rows in each step is
short, and what depends on no row has the block's own bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from executor.graphs.lower import outputs_of
from executor.graphs.operations import Refused
from executor.graphs.thin import thin
from executor.model.tree import PSEUDO
from executor.plan.environment import Environment
from executor.plan.functional import first_unstable, spread_copies
from executor.plan.ir import Carried, Plan
from executor.plan.run import is_kept
from executor.plan.segments import Parts, parts_of

_COPY = torch.ops.aten.copy_.default
_SAME = tuple(getattr(torch.ops.aten, name).default for name in ("clone", "alias", "detach", "view", "lift_fresh_copy"))
_RAW = ("as_strided", "as_strided_scatter")


@dataclass(frozen=True)
class Hoisted:
    """A program, and what it takes of constants.

    Attributes:
        plan: the plan.
        content: stands for the plan's operations, and for what becomes of their results.
        parts: the program. Its inputs are the tensors of the locations, the carried tensors, and `values`.
        reads: for each location, the indices of the inputs.
        states: the index of the input of each carried tensor, by name.
        values: the nodes of the plan's program whose results are inputs, by the index of the input.
        own: the inputs among them that depend on a constant of the request.
        known: the outputs that depend on constants alone, with their nodes.
        results: where the other outputs are among the program's results.
    """

    plan: Plan
    content: str
    parts: Parts
    reads: tuple[tuple[int, ...], ...]
    states: Mapping[str, int]
    values: Mapping[int, fx.Node]
    own: frozenset[int]
    known: Mapping[int, fx.Node]
    results: Mapping[int, int]

    @property
    def outside(self) -> bool:
        """Whether a part of the program runs after the model's pass, at the logits or the samples."""
        return self.inside < len(self.reads)

    @cached_property
    def inside(self) -> int:
        """How many of the locations are in the model's pass; they are the first."""
        return sum(read.path not in PSEUDO for read in self.plan.reads)

    @cached_property
    def crossing(self) -> tuple[fx.Node, ...]:
        """The operations and tensors of locations in the pass that the part after the pass needs."""
        if not self.outside or not self.inside:
            return ()
        within = {self.parts.inputs[index] for read in self.reads[: self.inside] for index in read}
        within |= {node for nodes in self.parts.segments[: self.inside] for node in nodes}
        later = [node for nodes in self.parts.segments[self.inside :] for node in nodes]
        needed = [one for node in later for one in node.all_input_nodes]
        needed += [self.parts.results[self.results[one.output]] for one in self.changed]
        return tuple(dict.fromkeys(one for one in needed if one in within))

    @cached_property
    def changed(self) -> tuple[Carried, ...]:
        """What the next step finds otherwise than this step has."""
        return tuple(one for one in self.plan.carried if not is_kept(self.plan, one))

    @cached_property
    def emitted(self) -> tuple[tuple[int, ...], ...]:
        """The outputs that a step leaves for the block, in groups of equal values.

        They are for its lists, for its names, and for the next step. A tensor and a copy of it are one value, and are left once.
        """
        outputs = {*outputs_of(self.plan), *(one.output for one in self.changed)}
        groups: dict[fx.Node, list[int]] = {}
        for output in sorted(outputs - self.known.keys()):
            groups.setdefault(_origin(self.parts.results[self.results[output]]), []).append(output)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def forms(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The shape and dtype of each emitted value."""
        values = [self.parts.results[self.results[group[0]]].meta["val"] for group in self.emitted]
        return tuple((tuple(value.shape), value.dtype) for value in values)

    @cached_property
    def put(self) -> frozenset[int]:
        """The inputs that are put at indices of a tensor.

        A number on the host would be copied there in each step.
        """
        nodes = {node.args[2] for node in self.parts.graph.nodes if node.target is torch.ops.aten.index_put.default}
        return frozenset(i for i, node in enumerate(self.parts.inputs) if node in nodes)

    def unstable(self, shared: frozenset[int]) -> str:
        """Return the first operation whose last bits may depend on the number of rows.

        It is "" if there is none.

        Args:
            shared: the inputs that all rows have in common.
        """
        names = [node.name for node in self.parts.inputs]
        return first_unstable(self.parts.graph, frozenset(names[i] for i in shared), names)

    def computed(self, environment: Environment) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Run the operations that need constants alone.

        Returns:
            The program's inputs `values`, and the known outputs, by their indices, of any shape. They may be the block's own
            tensors.
        """
        found: dict[fx.Node, Any] = {}
        plan = self.plan
        for name, node in zip(plan.inputs, plan.functional.inputs, strict=True):
            kind, _, number = name.partition("_")
            if kind == "const":
                found[node] = environment.constants[int(number)][1].detach()
            elif kind == "literal":
                found[node] = plan.literals[int(number)]
        wanted = {*self.values.values(), *self.known.values()}
        needed: set[fx.Node] = set()
        for node in reversed(plan.functional.graph.nodes):
            if node in wanted or node in needed:
                needed.update((node, *node.all_input_nodes))
        with torch.inference_mode(False), torch.no_grad():
            for node in plan.functional.graph.nodes:
                if node in needed and node.op == "call_function":
                    args = fx.node.map_arg(node.args, found.__getitem__)
                    found[node] = node.target(*args, **fx.node.map_arg(node.kwargs, found.__getitem__))
        values = {index: found[node] for index, node in self.values.items()}
        return values, {output: found[node] for output, node in self.known.items()}


def hoist(plan: Plan, content: str) -> Hoisted:
    """Return a plan's program without the operations that need constants alone.

    Args:
        plan: the plan.
        content: as of `Hoisted`.

    Raises:
        Refused: the program depends on how its tensors lie in memory, or on no location.
    """
    if plan.rows != 1:
        raise Refused("the plan is for several rows of a request")
    if not plan.reads:
        raise Refused("the block reads no location")
    names = dict(zip(plan.functional.inputs, plan.inputs, strict=True))
    fixed: dict[fx.Node, bool] = {}  # the nodes that need constants alone: whether they need one of the request's
    for node in plan.functional.graph.nodes:
        if node.op == "placeholder":
            if names[node].startswith(("const_", "literal_")):
                fixed[node] = names[node].startswith("const_")
        elif node.op == "call_function" and all(one in fixed for one in node.all_input_nodes):
            fixed[node] = any(fixed[one] for one in node.all_input_nodes)
        elif node.op == "call_function":
            _check(node)
    written = {write.output for write in plan.writes} | {one.output for one in plan.carried}
    given = plan.functional.results
    kept = [i for i, node in enumerate(given) if node not in fixed or i in written]
    frontier = {
        one: None
        for node in plan.functional.graph.nodes
        if node.op == "call_function" and node not in fixed
        for one in node.all_input_nodes
        if one in fixed
    } | {given[i]: None for i in kept if given[i] in fixed}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    index: dict[fx.Node, int] = {}
    for node in [one for one in plan.functional.inputs if one not in fixed] + list(frontier):
        index[node] = len(index)
        env[node] = graph.placeholder(names.get(node) or node.name)
        env[node].meta.update(node.meta)
    for node in plan.functional.graph.nodes:
        if node.op == "call_function" and node not in fixed:
            if node.target is _COPY:  # A carried tensor is changed in place: what is written there counts from now on.
                env[node] = env[node.args[0]] = env[node.args[1]]
            else:
                env[node] = graph.node_copy(node, env.__getitem__)
    graph.output([env[given[i]] for i in kept])
    spread_copies(graph)
    reads = tuple(tuple(index[plan.functional.inputs[i]] for i in read.inputs) for read in plan.reads)
    values = {index[node]: node for node in frontier}
    thin(graph, reads)
    return Hoisted(
        plan,
        content,
        parts_of(graph, reads, recorded=False),
        reads,
        {one.name: index[plan.functional.inputs[one.input]] for one in plan.carried},
        values,
        frozenset(i for i, node in values.items() if fixed[node]),
        {i: node for i, node in enumerate(given) if node in fixed},
        {output: at for at, output in enumerate(kept)},
    )


def _origin(node: fx.Node) -> fx.Node:
    """Return the node that a node has its value from, bit by bit and in the same shape."""
    while node.op == "call_function" and node.target in _SAME:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.meta["val"].shape != node.meta["val"].shape:
            break
        node = source
    return node


def _rows(node: fx.Node) -> bool:
    """Return whether a node is a tensor with dimensions, which is on one device with the others."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _check(node: fx.Node) -> None:
    """Refuse an operation that depends on how tensors lie in memory, or that changes a tensor."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    name = schema.name.partition("::")[2]
    if name in _RAW:
        raise Refused(f"{name} depends on how tensors lie in memory")
    if node.target is _COPY and node.args[0].op == "placeholder":
        one, other = node.args[0].meta["val"], node.args[1].meta["val"]
        if (one.shape, one.dtype) == (other.shape, other.dtype):
            return
    devices = {one.meta["val"].device.type for one in (node, *node.all_input_nodes) if _rows(one)}
    if len(devices) > 1:
        raise Refused(f"{name} takes a tensor to the host in every step")
    if schema.is_mutable:
        raise Refused(f"{name} changes a tensor in place")
