"""A program cut at the locations that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx import Node


@dataclass(frozen=True)
class Parts:
    """A program cut at the locations.

    Attributes:
        graph: the program.
        inputs: its inputs, in order.
        segments: for each location, the operations that need it and no later one; the first also has what needs none.
        results: the nodes that give the outputs.
    """

    graph: fx.Graph
    inputs: list[Node]
    segments: list[list[Node]]
    results: list[Node]


def parts_of(graph: fx.Graph, reads: Sequence[Sequence[int]], recorded: bool) -> Parts:
    """Cut a program at the locations that it reads.

    Args:
        graph: the program.
        reads: for each location, the indices of the program's inputs.
        recorded: whether the program has operations in place, so that its order counts.

    Operations keep their order. An operation in place comes with those before it, so the recorded program is cut at the first
    operation that needs a location.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    at = {inputs[index]: number for number, read in enumerate(reads) for index in read}
    segments: list[list[Node]] = [[] for _ in reads or ((),)]
    segment_of: dict[Node, int] = dict.fromkeys(inputs, 0) | at
    now = 0
    results: list[Node] = []
    for node in graph.nodes:
        if node.op == "call_function":
            needs = max((segment_of[one] for one in node.all_input_nodes), default=0)
            now = max(now, needs)
            segment_of[node] = now if recorded else needs
            segments[segment_of[node]].append(node)
        elif node.op == "output":
            results = list(node.args[0])
    return Parts(graph, inputs, segments, results)
