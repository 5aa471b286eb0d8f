"""Modules that a block skips: `module.skip(value)`.

The engine runs a module for its whole batch, so a skipped module runs too. Its output for the rows of the request is replaced
before any other code sees it. That is the same as not running the module, except for the KV cache: an attention layer that runs
writes its keys and values.

As long as a request skips the layer in every step, none of them is ever read. A request that lets the layer run later would
attend to what the skipped steps wrote. No model that skipped them has these keys and values, so this is refused.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from executor.core.errors import Refusal
from executor.model.node import Node
from executor.model.remote_module import RemoteModule
from executor.model.tree import ModuleTree
from interpose.v1 import trace_pb2 as pb


def holds_attention(module: torch.nn.Module) -> bool:
    """Return whether a module contains a layer that keeps a KV cache or another state."""
    if isinstance(module, RemoteModule):
        return module.attention
    return any(isinstance(part, AttentionLayerBase) for part in module.modules())


class Skips:
    """What one request skips.

    Args:
        tree: the model's modules.

    Attributes:
        owed: modules with attention that were skipped, with the first step; they must be skipped in every later one.
    """

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._now: dict[str, int] = {}  # path → the last step that it was skipped in
        self.owed: dict[str, int] = {}

    def begin(self, node: Node, step: int, position: int) -> None:
        """Note that a module is skipped in a step.

        Args:
            node: the module.
            step: the step it is skipped in.
            position: the model's position in that step; -1 for a step to come.

        Raises:
            Refusal: it cannot be skipped, or is running or has run.
        """
        if node.module is None:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{node.path} is not a module that could be skipped; assign {node.path}.output = value",
                location=node.path,
            )
        where = f"{node.path}.skip"
        self._tree.order_of(node.path, "output")
        if position > self._tree.order_of(node.path, "input"):
            raise Refusal(
                pb.ERROR_CODE_OUT_OF_ORDER,
                f"{node.path} had already begun when it was to be skipped; call skip before anything in it or after it is "
                "asked for, at the latest at its own input",
                location=where,
            )
        if holds_attention(node.module):
            first = self.owed.setdefault(node.path, step)
            if step > first and self._now.get(node.path) != step - 1:
                raise self._gap(node.path, first)
        self._now[node.path] = step

    def around(self, path: str, step: int) -> str:
        """Return the skipped module that contains a location of a step; "" if there is none."""
        return next((skipped for skipped, at in self._now.items() if at == step and path.startswith(skipped + ".")), "")

    def missed(self, step: int) -> Refusal | None:
        """Return why the request cannot go on after it ran a module that it had to skip, or None."""
        for path, first in self.owed.items():
            if self._now.get(path, -1) < step:
                return self._gap(path, first)
        return None

    def fingerprint(self) -> str:
        """Return a text that two ranks share only if they skip the same modules."""
        return repr(sorted(self._now.items())) if self._now else ""

    @staticmethod
    def _gap(path: str, first: int) -> Refusal:
        return Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            f"{path} was skipped from step {first} on and was then to run: it holds attention, and its cache has no keys and "
            "values of the steps that skipped it. Skip it in every later step (for step in tracer.iter[:]: …), end the "
            "request with tracer.stop(), or skip its mlp and change the output of its attention instead",
            location=path,
        )
