"""Modules that a sandboxed block wants applied, and weights that it wants to read."""

from __future__ import annotations

from typing import Any

import torch

from executor.model.apply import Applier
from executor.model.call import Call
from executor.model.node import Node
from executor.model.parameters import Wanted
from executor.model.remote_module import names_of
from executor.model.tree import ModuleTree
from executor.sandbox.pool import Lost


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


def _itself(wanted: Wanted) -> Any:
    return wanted
