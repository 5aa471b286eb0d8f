"""The benchmark of several ranks: its rows, and the comparison with one rank."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import tier_ranks
from benchmarks.tier_rows import ROWS


class Engine:
    """Stands where an engine's process does: rows take their own time, and one is refused."""

    def ask(self, row: str = "", **request: Any) -> float | str:
        return {"": 1.0, "steer": 1.2, "capture one": 1.5, "capture all": "it failed", "plain": 1.0}[row]


def test_rows_are_measured_beside_stock_and_a_refused_row_is_left_out() -> None:
    request = {"batch": 32, "prompt_tokens": 64, "tokens": 100}
    found = dict(tier_ranks._measured(Engine(), Engine(), request, rounds=2, seconds=60.0))
    assert found.keys() == {"stock", "control", "plain", "capture one", "steer"}
    assert found["steer"] == {"ms/step": 12.0, "ratio": 1.2, "quartile 1": 1.2, "quartile 3": 1.2, "rounds": 2}


def test_ratios_over_several_ranks_are_compared_with_one_rank() -> None:
    found = {
        "1b, 1 ranks, batch 32, steer": {"ratio": 1.1},
        "1b, 2 ranks, batch 32, steer": {"ratio": 1.21},
        "1b, 2 ranks, batch 32, stock": {"ms/step": 2.0},
        "1b, 2 ranks, batch 1, steer": {"ratio": 1.3},  # not measured at one rank
    }
    compared = tier_ranks.compared(found)
    assert compared.keys() == {"1b, 2 ranks, batch 32, steer: over one rank"}
    assert compared["1b, 2 ranks, batch 32, steer: over one rank"]["ratio"] == pytest.approx(1.1)


def test_constants_of_the_rows_travel_inside_the_trace() -> None:
    assert {name for row in tier_ranks.NAMES for name in ROWS[row].captured} == {"vector"}
