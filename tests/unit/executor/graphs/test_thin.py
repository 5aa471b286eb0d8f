"""What a program computes twice, and copies that it does not need, are dropped; needed copies stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from executor.graphs.thin import thin
from executor.plan.functional import interpret

Program = Callable[..., Sequence[torch.Tensor]]


def thinned(program: Program, inputs: int, reads: Sequence[Sequence[int]]) -> tuple[Counter[str], Any]:
    """Return the operations of a program that is thinned, by their names, and its graph."""
    given = [torch.randn(1, 6) for _ in range(inputs)]
    graph = make_fx(program, tracing_mode="fake")(*given).graph
    thin(graph, reads)
    results = interpret(graph, given)
    for one, other in zip(results, program(*given), strict=True):
        assert torch.equal(one, other)
    return Counter(node.target._schema.name[6:] for node in graph.nodes if node.op == "call_function"), graph


def test_what_is_computed_twice_is_computed_once() -> None:
    found, _ = thinned(lambda x: [(x + 1) * (x + 1), (x + 1).relu()], 1, [[0]])
    assert found == {"add": 1, "mul": 1, "relu": 1}


def test_numbers_that_are_equal_are_not_the_same() -> None:
    found, _ = thinned(lambda x: [x * 0.0, x * -0.0, x + 1, x + 1.0], 1, [[0]])
    assert found == {"mul": 2, "add": 2}


def test_a_copy_that_is_used_at_its_location_alone_is_dropped() -> None:
    found, _ = thinned(lambda x, y: [x.clone()[:, 1:3].clone() * 2, y.clone() + 1], 2, [[0], [1]])
    assert "clone" not in found


def test_a_copy_is_kept_for_a_later_location_and_for_a_result() -> None:
    assert thinned(lambda x, y: [x.clone()[:, :3] + y.clone()[:, 3:]], 2, [[0], [1]])[0]["clone"] == 1
    assert thinned(lambda x: [x.clone()], 1, [[0]])[0]["clone"] == 1
    assert thinned(lambda x: [x.clone()[:, 1:]], 1, [[0]])[0]["clone"] == 1


def test_both_tensors_of_a_pair_that_are_exchanged_are_copied() -> None:
    assert thinned(lambda x, y: [y.clone(), x.clone()], 2, [[0, 1]])[0]["clone"] == 2


def test_a_copy_that_lies_otherwise_is_kept() -> None:
    found, _ = thinned(lambda x: [(x * 2).t().clone(memory_format=torch.contiguous_format).view(2, 3) + 1], 1, [[0]])
    assert found["clone"] == 1
