"""A program cut at the locations that it reads, and run part by part: for one request, or for many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from executor.plan.ir import Plan


class ProgramRun:
    """The program of a plan on its way through a step.

    Args:
        graph: the program.
        plan: the plan.
        inputs: the tensors that do not come from locations, by the index of the program's input.
        shared: of a program for many requests, the inputs that have no dimension of requests; None: for one request.
        requests: how many requests it is for.
    """

    def __init__(
        self,
        graph: fx.Graph,
        plan: Plan,
        inputs: dict[int, torch.Tensor],
        shared: frozenset[int] | None = None,
        requests: int = 1,
    ) -> None:
        self._requests = requests
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
            return tensor.expand(self._requests, *tensor.shape)
        return tensor


def _called(node: Node, env: dict[Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, env.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
    return node.target(*args, **kwargs)


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
    segments: list[list[Node]] = [[] for _ in plan.reads or (None,)]
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
