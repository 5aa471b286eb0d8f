"""In bfloat16 every location and change is as near to the float32 truth as transformers' own bfloat16 forward is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fidelity.half import Compared, Distance, measure_half, ratio, too_far
from tests.fidelity.layouts import ONE_RANK
from tests.fidelity.measure import SCHEDULINGS, Known
from tests.fidelity.recorded import summary, written_on
from tests.fidelity.table import page

COLUMNS = {"gemma3": SCHEDULINGS[1], "qwen3_moe": SCHEDULINGS[2]}


@pytest.mark.parametrize("column", COLUMNS)
def test_every_location_and_change(column: str, tmp_path: Path) -> None:
    Known.write(tmp_path, column)
    halves = measure_half(tmp_path, column, ONE_RANK, [COLUMNS[column]])
    assert too_far(halves) == []
    assert ratio(halves) > 0.5, "rounding is to be seen in some location"
    found = summary(halves, written_on(page().read_text(), ONE_RANK)[column])
    assert found["otherwise"] == []
    assert found["largest"] > 1e-3, "the engine is to compute in bfloat16"


def test_a_location_that_is_further_off_than_rounding_makes_it_is_named() -> None:
    exact = torch.linspace(-1, 1, 64).reshape(8, 8)
    rounded = exact.bfloat16()
    right, wrong = Compared(), Compared()
    right.add(rounded, rounded, exact)
    wrong.add(rounded.roll(1, 0), rounded, exact)
    halves = {"right": {"prefill": right.pair()}, "wrong": {"prefill": right.pair(), "decode": wrong.pair()}}
    assert [row.partition(":")[0] for row in too_far({**halves, "refused": {"prefill": "no"}})] == ["wrong"]
    assert ratio(halves) > 100


def test_distances_of_several_tensors_and_of_none() -> None:
    distance = Distance()
    expected = [torch.tensor([3.0, 4.0]), None, (torch.tensor([1000]),)]
    distance.add([torch.tensor([3.0, 4.5]), None, (torch.tensor([1000]),)], expected)
    assert float(distance) == pytest.approx(0.1)
    distance.add(expected, expected)  # over both
    assert float(distance) == pytest.approx(0.1 / 2**0.5)
    zero = Distance()
    zero.add(torch.tensor([3.0, 4.0]), torch.zeros(2))
    assert float(zero) == 5.0
    assert float(Distance()) == 0.0
    with pytest.raises(AssertionError):
        Distance().add(torch.zeros(1, 2), torch.zeros(2))
