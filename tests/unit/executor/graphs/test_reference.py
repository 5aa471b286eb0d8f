"""The tables and the reference against the torch code that a block would have."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.graphs import reference
from executor.graphs.operations import Code, Tap, ablate, cap, steer, steer_by_norm, swap
from executor.graphs.shares import Share
from executor.graphs.tables import LATER, PROMPT
from tests.unit.executor.graphs.samples import CPU, make_tables, numbers, same, sample

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def as_a_block(tap: Tap, mine: torch.Tensor) -> torch.Tensor | None:
    """Run a tap on a request's rows, [rows, columns], as torch code on a view; return what it reads."""
    x = mine[tap.rows[0] : tap.rows[1], tap.columns[0] : tap.columns[1]]
    operand = tap.number if tap.vector is None else tap.vector
    if tap.code is Code.READ:
        return x.clone()
    if tap.code is Code.ADD:
        x += operand
    elif tap.code is Code.MULTIPLY:
        x *= operand
    elif tap.code is Code.SET:
        x[:] = operand
    else:
        x.clamp_(tap.low, tap.high)
    return None


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1 << 30), pair=st.booleans())
def test_elementwise_operations_have_the_bits_of_torch(dtype: torch.dtype, seed: int, pair: bool) -> None:
    made = sample(seed, dtype)
    tables, rng = made.tables, random.Random(seed)
    reads: dict[tuple[int, int], torch.Tensor] = {}
    for site, width in enumerate(tables.widths):
        first = numbers(rng, made.padded, width, dtype=dtype)
        second = numbers(rng, made.padded, width, dtype=dtype) if pair else None
        expected, residual = first.clone(), None if second is None else second.clone()
        row = 0
        for slot, count in made.batch:
            rows = slice(row, row + count)
            row += count
            taps = [(i, tap) for i, tap in enumerate(made.taps.get(slot, ())) if tap.site == site]
            mine = expected[rows] if residual is None else expected[rows] + residual[rows]
            before = mine.clone()
            written = torch.zeros(count, dtype=torch.bool)
            for i, tap in taps:
                if tap.steps[0] <= made.steps[slot] < tap.steps[1]:
                    found = as_a_block(tap, mine)
                    if found is not None:
                        reads[slot, i] = found
                    else:
                        written[tap.rows[0] : tap.rows[1]] = True
            if residual is not None:
                changed = (before != mine).any(-1) & written
                expected[rows][changed] = 0
                residual[rows][changed] = mine[changed]
        reference.run_taps(tables, site, first, second)
        assert same(first, expected)
        assert second is None or (residual is not None and same(second, residual))
    got = {}
    for area, outgoing in ((LATER, made.outgoing[0]), (PROMPT, made.outgoing[1])):
        for slot, share in outgoing.shares.items():
            assert share.start + share.size <= outgoing.top
            got.update({(slot, tap): value for tap, value in read_of(tables.output, area * tables.split, share)})
    assert {key for key, value in reads.items() if value.numel()} == set(got)
    assert all(same(got[key], reads[key]) for key in got)


def read_of(output: torch.Tensor, base: int, share: Share) -> list[tuple[int, torch.Tensor]]:
    mine = output[base + share.start : base + share.start + share.size]
    return [
        (part.tap, mine[part.at : part.at + part.rows * part.width].view(part.rows, part.width)) for part in share.parts
    ]


def one_row(tap: Tap, row: torch.Tensor) -> torch.Tensor:  # [columns]
    tables = make_tables((row.shape[0],), row.dtype)
    tables.join(0, "", [tap], 1)
    tables.begin_step([(0, 1)], {0: 0}, 1)
    value = row[None].clone()
    reference.run_taps(tables, 0, value)
    return value[0]


def unit(*values: float) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.tensor(values), dim=0)


X = torch.tensor([3.0, -4.0, 1.0, 0.5])
U = unit(1.0, 2.0, 0.0, -1.0)
WHOLE = (0, 4)


def test_steering_adds_the_vector() -> None:
    assert torch.equal(one_row(steer(0, U, WHOLE), X), X + U)


def test_steering_by_the_norm() -> None:
    torch.testing.assert_close(one_row(steer_by_norm(0, U, WHOLE, 0.5), X), X + 0.5 * X.norm() * U)


def test_ablation_takes_the_direction_out() -> None:
    got = one_row(ablate(0, U, WHOLE), X)
    torch.testing.assert_close(got @ U, torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(got, X - (X @ U) * U)


def test_ablation_of_columns_leaves_the_others() -> None:
    u = unit(1.0, 1.0)
    got = one_row(ablate(0, u, (1, 3)), X)
    assert torch.equal(got[[0, 3]], X[[0, 3]])
    torch.testing.assert_close(got[1:3], X[1:3] - (X[1:3] @ u) * u)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-100.0, 100.0), (0.0, 0.25)])
def test_a_cap_bounds_the_part_along_the_direction(low: float, high: float) -> None:
    got = one_row(cap(0, U, WHOLE, low, high), X)
    torch.testing.assert_close(got @ U, (X @ U).clamp(low, high), atol=1e-5, rtol=0)
    torch.testing.assert_close(got - (got @ U) * U, X - (X @ U) * U, atol=1e-5, rtol=0)


def test_a_swap_exchanges_the_parts_along_two_directions() -> None:
    v = unit(2.0, -1.0, 5.0, 0.0)
    assert abs(float(U @ v)) < 1e-6
    got = one_row(swap(0, U, v, WHOLE), X)
    torch.testing.assert_close(torch.stack([got @ U, got @ v]), torch.stack([X @ v, X @ U]), atol=1e-5, rtol=0)


def test_a_pair_without_a_change_keeps_both_halves() -> None:
    tables = make_tables((4,), torch.float32, CPU)
    tables.join(0, "", [Tap(0, Code.READ, WHOLE), Tap(0, Code.MULTIPLY, WHOLE, number=1.0)], 1)
    tables.begin_step([(0, 1)], {0: 0}, 1)
    first, second = X[None].clone(), U[None].clone()
    reference.run_taps(tables, 0, first, second)
    assert torch.equal(first[0], X) and torch.equal(second[0], U)
    assert torch.equal(tables.output[:4], X + U)
