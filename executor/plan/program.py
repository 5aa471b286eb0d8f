"""A program cut at the locations that it reads, run in parts for one request or for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from executor.plan.segments import Parts

_CLONE = torch.ops.aten.clone.default


class ProgramRun:
    """The program of a plan on its way through a step.

    Args:
        parts: the program.
        inputs: the tensors that do not come from locations, by the index of the program's input.
        shared: of a program for many requests, the inputs that have no dimension of requests; None: for one request.
        requests: how many requests it is for.
    """

    def __init__(
        self,
        parts: Parts,
        inputs: dict[int, torch.Tensor],
        shared: frozenset[int] | None = None,
        requests: int = 1,
    ) -> None:
        self._requests = requests
        self._parts = parts
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

    def give(self, values: Mapping[Node, torch.Tensor]) -> None:  # [requests, ...]
        """Give the program results of its own that another run of it computed, of many requests."""
        self._env.update(values)
        self._batched.update(values)

    def serve(self, number: int, inputs: dict[int, torch.Tensor], own: bool = False) -> None:
        """Run the part of the program that follows a location.

        Args:
            number: the location's number.
            inputs: the tensors there, by the index of the program's input.
            own: whether the tensors are the block's own already, so that the program makes no copies of them.
        """
        self._place(inputs)
        nodes = self._parts.segments[number]
        if self._shared is None:
            copied = {self._parts.inputs[index] for index in inputs} if own else ()
            for node in nodes:
                if node.target is _CLONE and node.args[0] in copied:
                    self._env[node] = self._env[node.args[0]]
                else:
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
        return self.value(self._parts.results[output])

    def value(self, node: Node) -> torch.Tensor:  # any shape
        """Return the result of an operation, as of `result`."""
        tensor: torch.Tensor = self._env[node]
        if self._shared is not None and node not in self._batched:
            return tensor.expand(self._requests, *tensor.shape)
        return tensor


def _called(node: Node, env: dict[Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, env.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
    return node.target(*args, **kwargs)
