"""Drops operations of a program that give what is there already: repeated ones, and copies.

A block gets copies of the model's tensors, because it may change them. A program changes nothing, so it can read the model's own
memory, as long as the model has not gone on: an operation after a later location, and a change of another tensor of the location,
need a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from executor.plan.segments import parts_of

_CLONES = ("aten::clone", "aten::lift_fresh_copy")


def thin(graph: fx.Graph, reads: Sequence[Sequence[int]]) -> None:
    """Drop what a program computes twice, and the copies that it does not need.

    Args:
        graph: the program, without in-place operations; changed here.
        reads: for each location, the indices of the program's inputs.
    """
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _is_clone(node) and node.args[0].op != "placeholder" and _lies_alike(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            continue
        again = known.setdefault((node.target, keyed(node.args), keyed(node.kwargs)), node)
        if again is not node:
            node.replace_all_uses_with(again)
    graph.eliminate_dead_code()
    _drop_copies(graph, reads)


def _drop_copies(graph: fx.Graph, reads: Sequence[Sequence[int]]) -> None:
    """Have operations read the model's memory, where the model has not gone on meanwhile."""
    parts = parts_of(graph, reads, recorded=False)
    segment_of = {node: number for number, nodes in enumerate(parts.segments) for node in nodes}
    for number, read in enumerate(reads):
        for node in [parts.inputs[index] for index in read]:
            clones = [one for one in node.users if _is_clone(one) and _lies_alike(one, node)]
            aliases = _aliases(node)
            used = {user for one in aliases for user in one.users}
            if all(segment_of.get(one) == number for one in used):  # the results are among the users
                for clone in clones:
                    clone.replace_all_uses_with(node)
    graph.eliminate_dead_code()


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that would lie in a node's memory if nothing were copied."""
    found, todo = {node}, [node]
    while todo:
        one = todo.pop()
        for user in one.users:
            if user not in found and (_is_clone(user) or _may_alias(user)):
                found.add(user)
                todo.append(user)
    return found


def _may_alias(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):  # a part of a tuple
        return True
    return any(one.alias_info is not None for one in node.target._schema.returns)


def _is_clone(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.name in _CLONES


def _lies_alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return bool(one.shape == two.shape and one.stride() == two.stride() and one.dtype == two.dtype)


def keyed(value: Any) -> Any:
    """Return what an argument is compared by.

    1, 1.0 and True are not the same, nor are 0.0 and -0.0.
    """
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(keyed, value))
    if isinstance(value, dict):
        return tuple((name, keyed(one)) for name, one in sorted(value.items()))
    return type(value), repr(value)
