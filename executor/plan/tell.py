"""Tells a plan as plain values; `executor.plan.portable` makes the plan of them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from executor.plan import allowed
from executor.plan.ir import Item, Plan
from executor.plan.plain import DTYPE, FORMAT, NODE
from executor.plan.refuse import Refused
from executor.plan.run import is_kept


def told_of(plan: Plan, given: Mapping[int, torch.Tensor]) -> dict[str, Any]:  # tensors: any shape
    """Return a plan as plain values.

    Args:
        plan: the plan.
        given: the tensors that do not come from locations, by the index of the program's input.

    Raises:
        Refused: it has what no plan from another process may have.
    """
    graph, numbers = plan.functional.graph, dict[fx.Node, int]()
    nodes: list[tuple[Any, ...]] = []
    count = 0
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            numbers[node] = numbers[node.args[1]]  # what is carried in place; the worker carries the result itself
            continue
        numbers[node] = count
        count += 1
        if node.op == "placeholder":
            continue
        name, line = allowed.names().get(node.target), node.meta.get("line") or 0
        if name is None:
            raise Refused(line, f"{node.target} is not among the operations that a sandboxed block's plan may have")
        args = [_told(one, numbers, line) for one in node.args]
        named = {
            key: _told(one, numbers, line) for key, one in node.kwargs.items() if key not in allowed.DEVICE_ARGUMENTS
        }
        nodes.append((name, args, named))
    carried = [(one.input, one.output) for one in plan.carried if not is_kept(plan, one)]
    begins = {one.input for one in plan.carried}
    every = {output for one in plan.appends for output in (*_outputs(one.key), *_outputs(one.item), one.when)} - {-1}
    last = {output for _, item in plan.results for output in _outputs(item)} | {output for _, output in carried}
    return {
        "inputs": len(plan.inputs),
        "nodes": nodes,
        "results": [numbers[node] for node in plan.functional.results],
        "reads": [(one.path, one.kind, list(one.inputs), one.line) for one in plan.reads],
        "writes": [(one.read, one.leaf, tuple(one.at), one.output, one.mutated) for one in plan.writes],
        "guards": [
            ([tuple(step) for step in one.expression.operations], one.sign, one.number, one.outcome)
            for one in plan.guards
        ],
        "fixed": {index: _laid_out(tensor) for index, tensor in given.items() if index not in begins},
        "begins": {index: _laid_out(tensor) for index, tensor in given.items() if index in begins},
        "carried": carried,
        "every": sorted(every),
        "last": sorted(last - every - {-1}),
    }


def _outputs(item: Item | None) -> Iterator[int]:
    """Yield the outputs of which a value is made."""
    if item is not None:
        yield item.output
        yield item.snapshot
        for part in (*item.items, *item.keys):
            yield from _outputs(part)


def _told(value: Any, numbers: Mapping[fx.Node, int], line: int) -> Any:
    """Return an argument as plain values."""
    if isinstance(value, fx.Node):
        return NODE, numbers[value]
    if isinstance(value, torch.dtype):
        return DTYPE, str(value).partition(".")[2]
    if isinstance(value, torch.memory_format):
        return FORMAT, next((name for name, one in allowed.FORMATS.items() if one is value), "other")
    if isinstance(value, tuple | list):
        return [_told(one, numbers, line) for one in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise Refused(line, f"a {type(value).__name__} is an argument of an operation")


def _laid_out(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:  # any shape
    """Return a tensor as it lies in memory, and the order in which its dimensions lie there."""
    tensor = tensor.detach()
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    flat = tensor.permute(order)
    if not flat.is_contiguous():
        return tensor.contiguous(), list(range(tensor.dim()))
    return flat, order
