"""Modules that a sandboxed block wants applied, and weights that it wants to read."""

from __future__ import annotations

from typing import Any

import torch

from executor.core.errors import Refusal
from executor.model.apply import Applier
from executor.model.call import Call
from executor.model.node import Node
from executor.model.parameters import Wanted
from executor.model.remote_module import names_of
from executor.model.tree import ModuleTree
from executor.sandbox.errors import told_of
from executor.sandbox.process import Lost
from executor.views.experts import Chosen
from interpose.v1 import trace_pb2 as pb


class Calls:
    """Checks what a process says that its block wants.

    Args:
        tree: the model's modules.
        applier: applies modules to the block's values.
    """

    def __init__(self, tree: ModuleTree, applier: Applier) -> None:
        self._tree = tree
        self._applier = applier

    def of(self, told: Any) -> Call:
        """Return a module to apply, or a weight to read.

        Raises:
            Lost: there is no such module.
            Refusal: it cannot be applied to these values.
        """
        if not isinstance(told, tuple) or len(told) != 4 or not isinstance(told[1], str):
            raise Lost("it asked for no module")
        what, path, first, second = told
        node = self._tree.find(path)
        if node is None:
            raise Lost("it asked for no module")
        with torch.inference_mode(False), torch.no_grad():
            if what == "apply" and isinstance(first, list) and isinstance(second, dict):
                if not all(isinstance(name, str) for name in second):
                    raise Lost("it asked for no module")
                args = [self._placed(value) for value in first]
                return self._applier.prepare(
                    node, tuple(args), {name: self._placed(value) for name, value in second.items()}
                )
        if what == "weight" and isinstance(first, str):
            return self._weight(node, first, second)
        raise Lost("it asked for no module")

    def _placed(self, value: Any) -> Any:
        return value.to(self._tree.device) if isinstance(value, torch.Tensor) else value

    def _weight(self, node: Node, name: str, rows: Any) -> Call:
        """Return what reads a weight, or rows of it."""
        if node.layer is None or name not in names_of(node.layer):
            raise Lost("it asked for no weight")
        wanted: Any = self._applier.parameters.open(node, name, _itself)
        if rows is not None:
            if isinstance(wanted, Wanted) or not isinstance(rows, list) or not all(type(row) is int for row in rows):
                raise Lost("it asked for no rows of a weight")
            wanted = wanted[torch.tensor(rows, dtype=torch.int64)]  # which checks them
        if not isinstance(wanted, Wanted):
            raise Lost("it asked for a weight that is given by rows")
        return Call(node, (), {}, single=False, wanted=wanted)

    def routed(self, told: Any, rows: int) -> dict[str, Any]:
        """Return which experts a router chooses.

        Args:
            told: the layer, as of `ChosenThere`, and the router's logits, [rows, experts].
            rows: the number of rows that the block has.

        Raises:
            Lost: there is no such router, or the logits are none.
        """
        form = isinstance(told, tuple) and [type(item) for item in told] == [str, int, torch.Tensor]
        node = self._tree.find(told[0]) if form else None
        views = [] if node is None else [one for one in node.views.values() if isinstance(one, Chosen)]
        view = next((one for one in views if one.item == told[1]), None)
        if view is None:
            raise Lost("it asked for a router that there is not")
        logits = told[2]
        experts = view.runner.moe_config.num_logical_experts
        if logits.shape != (rows, experts) or not logits.is_floating_point():
            raise Lost("it asked what a router makes of no logits")
        try:
            with torch.inference_mode(False), torch.no_grad():
                return {"error": None, "chosen": view.choose(logits.to(self._tree.device))}
        except Exception as error:
            message = f"the router of {told[0]} cannot be asked: {type(error).__name__}"
            return {"error": told_of(Refusal(pb.ERROR_CODE_ENGINE, message)), "chosen": None}


def _itself(wanted: Wanted) -> Any:
    return wanted
