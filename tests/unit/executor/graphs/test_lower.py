"""Plans become taps that give the bits of the plan's program, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from executor.graphs import reference
from executor.graphs.lower import Lowered, SiteKey, lower
from executor.graphs.operations import Refused
from executor.graphs.tables import LATER, Tables
from executor.plan.forms import Form, Group, Leaf
from executor.plan.functional import interpret, tidy
from executor.plan.ir import Item, Plan, Write
from tests.unit.executor.graphs.samples import CPU, LIMITS, same

W = 8
# The model of these tests: a layer's pair, and the output of a projection.
SITES: dict[SiteKey, int] = {
    ("layer", "output", ((0,),)): 0,
    ("layer", "output", ((1,),)): 1,
    ("layer", "output", ((0,), (1,))): 2,
    ("proj", "output", ((),)): 3,
    ("proj", "output", ((),), True): 4,
}
V, TWICE = torch.randn(W), torch.randn(W)
CONSTANTS = (V, TWICE, torch.tensor(0.37))

# Given the pair, the projection and the constants, a block's step returns what it keeps; it changes what it is given.
Block = Callable[[Any, Any, Any, Sequence[Any]], list[Any]]


def put(hidden: torch.Tensor, residual: torch.Tensor, now: torch.Tensor) -> None:
    """Write a stream back, as `executor.views.view.Stream` does."""
    changed = (hidden + residual != now).any(-1, keepdim=True)
    hidden.masked_fill_(changed, 0)
    residual.copy_(torch.where(changed, now, residual))


def plan_of(block: Block, dtype: torch.dtype = torch.bfloat16, rows: int = 1, **rest: Any) -> tuple[Plan, fx.Graph]:
    constants = [one.to(dtype) for one in CONSTANTS]

    def run(hidden: torch.Tensor, residual: torch.Tensor, proj: torch.Tensor, *given: torch.Tensor) -> list[Any]:
        mine = [one.clone() for one in (hidden, residual, proj)]
        kept = block(mine[0], mine[1], mine[2], given)
        return [*mine, *kept]

    like = [torch.zeros(rows, W, dtype=dtype) for _ in range(3)]
    made = make_fx(torch.func.functionalize(run), tracing_mode="fake")(*like, *constants)
    tidy(made.graph)
    leaves = (Leaf(0, (W,), dtype), Leaf(1, (W,), dtype))
    before = list(made.graph.nodes)[:3]
    results = next(iter(node for node in made.graph.nodes if node.op == "output")).args[0]
    changed = [
        i
        for i in range(3)
        if not (results[i].target is torch.ops.aten.clone.default and results[i].args[0] is before[i])
    ]
    writes = [Write(0, 0, (0,), 0, True), Write(0, 1, (1,), 1, True), Write(1, 0, (), 2, True)]
    plan = SimpleNamespace(
        rows=rows,
        reads=(
            SimpleNamespace(path="layer", kind="output", form=Form(Group(tuple, leaves), rows), inputs=(0, 1)),
            SimpleNamespace(path="proj", kind="output", form=Form(Leaf(0, (W,), dtype), rows), inputs=(2,)),
        ),
        writes=tuple(writes[i] for i in changed),
        carried=(),
        guards=(),
        holds=lambda step: True,
        appends=tuple(
            SimpleNamespace(item=Item("tensor", output=i), key=None, when=-1) for i in range(3, len(results))
        ),
        results=(("step", Item("number")),),
    )
    vars(plan).update(rest)
    return cast(Plan, plan), made.graph


def lowered(block: Block, dtype: torch.dtype = torch.bfloat16, rows: int = 1, **rest: Any) -> Lowered:
    plan, graph = plan_of(block, dtype, rows, **rest)
    constants = {3 + i: one.to(dtype) for i, one in enumerate(CONSTANTS)}
    return lower(plan, graph, constants, SITES, tails=True)


def slicing(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    p[:, 1:5] *= 0.5
    kept = p[:, 2:4].clone()
    p[:, 3:6].fill_(0)
    p[:, 7:] = c[2]
    return [kept, p[:, :3], p]


def stream(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    s = h + r
    first = s.clone()
    s += c[0]
    put(h, r, s)
    return [first, s]


def stream_columns(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    s = h + r
    s[:, 2:4] *= 2.0
    s -= c[1]
    put(h, r, s)
    return [s]


def whole(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    before = p.clone()
    p += c[0]
    middle = p.clone()
    p[:] = c[1]
    return [before, middle, p]


def scaled(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    p += 2.5 * c[0] + c[1]
    p += c[2]
    h *= c[0]
    r.clamp_(-0.5, 1.5)
    return [p, h, r]


def numbers_only(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    p.mul_(-3).add_(0.1).sub_(7)
    p[:, 0:1] = -p[:, 0:1]
    return []


def reading(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    return [h + r, h, r[:, 5:], p[:, 1:7][:, 2:3]]


def row(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    p[0] += c[0]
    return [p[-1], p[0, 2:5]]


def fused(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    p.add_(c[0] + 1)
    return [(c[1] + p) if False else p, c[0] * 2]


def one_half(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    r += c[0]
    return [h + r]


def half_and_sum(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    s = h + r
    h *= 2
    return [s]


def kept_elsewhere(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    return [p * 2]


def not_the_last(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    other = p * 2
    p += c[0]
    return [other]


def strided(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    return [p[:, ::2] * 1, c[0] - p, p > 0, p.to(torch.float64)]


def heads(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    s = (h + r).view(-1, 4, 2)
    s[:, 1].fill_(0)
    s[:, 2:] *= c[1].view(4, 2)[2:]
    p.view(-1, 2, 4)[:, 1] += c[0][:4]
    put(h, r, s.view(-1, W))
    return [s, s[:, 3], p[:, 2]]


def one_column(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    p[:, 3].fill_(2.5)
    p[:, 4] *= -1
    h[:] = torch.zeros_like(h)
    return [p]


def stream_set(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    s = h + r
    s[:] = c[0]
    put(h, r, s)
    return [s]


def wide(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    p += c[0].float() + 1e-5
    s = h + r
    s[:, 2:6] -= c[1][2:6].float() * 0.3
    put(h, r, s)
    p[:] = p.float() * (c[1].float() * 0.7)
    p[:, :4] = p[:, :4] + c[0][:4].float() / 3
    p[:, 6:] = c[0][6:].float() / 7
    return [p, s]


def widened(h: Any, r: Any, p: Any, c: Any) -> list[Any]:
    return [p.float(), p.float() - c[0].float(), (p.float() * c[0].float())[:, 2:]]


BLOCKS = [
    slicing,
    stream,
    stream_columns,
    whole,
    scaled,
    numbers_only,
    reading,
    fused,
    heads,
    one_column,
    stream_set,
    wide,
]
TAILS = [one_half, half_and_sum, kept_elsewhere, not_the_last, strided, widened]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block", [*BLOCKS, *TAILS, row])
def test_taps_give_the_bits_of_the_program(block: Block, rows: int, dtype: torch.dtype) -> None:
    plan, graph = plan_of(block, dtype, rows)
    made = lowered(block, dtype, rows)
    assert all(tap.exact for tap in made.taps)
    tables = Tables((W, W, W, W), 2, 8, dtype, CPU, LIMITS)
    tables.join(0, "a", made.taps, rows)
    outgoing = tables.begin_step([(1, 1), (0, rows)], {0: 0}, 1 + rows)
    values = [torch.randn(1 + rows, W).to(dtype) for _ in range(3)]
    values[0][:, 3] = float("nan")
    expected = interpret(graph, [one[1:].clone() for one in values] + [one.to(dtype) for one in CONSTANTS])
    plain = [one[:1].clone() for one in values]
    reference.run_taps(tables, 0, values[0])
    reference.run_taps(tables, 1, values[1])
    reference.run_taps(tables, 2, values[0], values[1])
    reference.run_taps(tables, 3, values[2])
    for got, other, want in zip(values, plain, expected, strict=False):
        assert same(got[:1], other) and same(got[1:], want)
    area = LATER if rows == 1 else 1
    share = outgoing[area].shares.get(0)
    parts = {part.tap: part for part in share.parts} if share is not None else {}
    assert (made.tail is not None) == (block in TAILS)

    def stacked(tap: int) -> torch.Tensor:  # [1, rows, columns]
        assert share is not None
        part, start = parts[tap], area * tables.split + share.start + parts[tap].at
        return tables.output[start : start + part.rows * part.width].view(1, part.rows, part.width)

    kept = made.values(stacked, 1)
    assert sorted(kept) == list(range(3, len(expected)))
    for i, value in kept.items():
        assert same(value[0].expand_as(expected[i]), expected[i])


REFUSED: list[tuple[Block, str]] = [
    (lambda h, r, p, c: [torch.tanh(p)], "aten.tanh"),
    (lambda h, r, p, c: [p.relu_()], "aten.relu"),
    (lambda h, r, p, c: [p.div_(3)], "aten.div"),
    (lambda h, r, p, c: [p.norm()], "aten"),
    (lambda h, r, p, c: [p.add_(c[0], alpha=2)], "aten.add.Tensor"),
    (lambda h, r, p, c: [p.clamp_(min=0)], "aten.clamp"),
    (lambda h, r, p, c: [p.add_(c[0].double())], "aten"),
    (lambda h, r, p, c: [p.copy_(p.float() * c[0].float() + c[1].float())], "aten.add"),
    (lambda h, r, p, c: [p.copy_(p.float() + 0.1)], "aten.add"),
    (lambda h, r, p, c: [p.copy_(h)], "aten.copy|not made of the location"),
]


@pytest.mark.parametrize(("block", "why"), REFUSED)
def test_other_programs_stay_plans(block: Block, why: str) -> None:
    with pytest.raises(Refused, match=why):
        lowered(block)


def test_a_location_without_a_site_is_refused() -> None:
    plan, graph = plan_of(reading)
    constants = {3 + i: one for i, one in enumerate(CONSTANTS)}
    with pytest.raises(Refused, match=r"layer\.output is no site"):
        lower(plan, graph, constants, {("proj", "output", ((),)): 0})


def test_an_assigned_value_has_a_site_of_its_own() -> None:
    assert {tap.site for tap in lowered(whole, writes=(Write(1, 0, (), 2, True),)).taps} == {3}
    assert {tap.site for tap in lowered(whole, writes=(Write(1, 0, (), 2, False),)).taps} == {4}
    with pytest.raises(Refused, match="stands in a value twice"):
        lowered(whole, writes=(Write(1, 0, (1,), 2, False),))


def test_guards_must_hold_in_every_step() -> None:
    plan, graph = plan_of(reading, guards=("one",), holds=lambda step: step >= 2)
    constants = {3 + i: one.to(torch.bfloat16) for i, one in enumerate(CONSTANTS)}
    made = lower(plan, graph, constants, SITES, (2, 9))
    assert {tap.steps for tap in made.taps} == {(2, 9)}
    for steps in ((1, 9), (2, 2**31 - 1)):
        with pytest.raises(Refused, match="something else in some of the steps"):
            lower(plan, graph, constants, SITES, steps)
