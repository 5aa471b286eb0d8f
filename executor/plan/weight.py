"""Bounds what the operations of a plan take, as a plan runs without its block's budget.

The operations on constants alone run when a request joins. The others run in each step, perhaps for the rows of many requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from executor.plan.refuse import Refused

MOST_CONSTANT_BYTES, MOST_CONSTANT_WORK = 256 << 20, 4 << 30  # of all results together; multiplications
MOST_ROW_BYTES, MOST_ROW_WORK = 16 << 20, 2 << 30  # likewise, for each row of the request

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default: 0, _ATEN.bmm.default: 0, _ATEN.addmm.default: 1, _ATEN.baddbmm.default: 1}
# Operations that compute more than some numbers for each element.
_HEAVY = ("linalg", "_linalg", "convolution", "lu_", "cholesky", "triangular", "fft", "_fft", "cdist", "_cdist")


def check_weight(graph: fx.Graph, served: Collection[fx.Node], rows: int, line: int) -> None:
    """Refuse a program that takes too much memory or time.

    Args:
        graph: the program without operations in place.
        served: the inputs that steps differ in: the tensors of locations, and carried tensors.
        rows: of the request in a step.
        line: where the region begins.

    Raises:
        Refused: with the line of the operation.
    """
    changing = set(served)
    spent = {False: (0, 0), True: (0, 0)}
    most = {
        False: (MOST_CONSTANT_BYTES, MOST_CONSTANT_WORK),
        True: (MOST_ROW_BYTES * rows, MOST_ROW_WORK * rows),
    }
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(one in changing for one in node.all_input_nodes):
            changing.add(node)
        kind = node in changing
        size, work = spent[kind][0] + _bytes(node), spent[kind][1] + _work(node)
        spent[kind] = size, work
        if size > most[kind][0] or work > most[kind][1]:
            what, instead = (
                ("makes large tensors in every step", "use smaller tensors")
                if kind
                else ("computes much from constants in every step", "compute it before the loop")
            )
            raise Refused(node.meta.get("line") or line, what, instead)


def _bytes(node: fx.Node) -> int:
    """Return the bytes of an operation's result; views are counted too."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _work(node: fx.Node) -> int:
    """Return about how many numbers an operation computes."""
    first = _PRODUCTS.get(node.target)
    made = _elements(node)
    if first is not None:
        return made * _value(node.args[first]).shape[-1]
    given = max([made, *map(_elements, node.all_input_nodes)])
    name: str = getattr(getattr(node.target, "_schema", None), "name", "").partition("::")[2]
    return given * math.isqrt(given) * 16 if name.startswith(_HEAVY) else given


def _value(node: Any) -> torch.Tensor:  # any shape
    found: torch.Tensor = node.meta["val"]
    return found


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0
