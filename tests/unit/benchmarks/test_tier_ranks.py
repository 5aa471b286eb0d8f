"""The benchmark of several ranks: its rows, and the comparison with one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import tier_ranks
from benchmarks.layouts import Layout
from benchmarks.models import Model
from benchmarks.tier_rows import ROWS
from benchmarks.tiers import Answering


class Engine:
    """Stands where an engine's process does: rows take their own time, and one is refused."""

    def ask(self, row: str = "", **request: Any) -> float | str:
        return {"": 1.0, "steer": 1.2, "capture one": 1.5, "capture all": "it failed", "plain": 1.0}[row]


class Service(Engine):
    """Stands where a service does: a row takes twice the time."""

    def ask(self, row: str = "", **request: Any) -> float | str:
        took = super().ask(row, **request)
        return took if isinstance(took, str) else 2 * took


REQUEST = {"batch": 32, "prompt_tokens": 64, "tokens": 100}


def test_rows_are_measured_beside_stock_and_a_refused_row_is_left_out() -> None:
    asked = {"stock": Engine(), "engine": Answering(Engine())}
    found = dict(tier_ranks._measured(asked, REQUEST, rounds=2, seconds=60.0))
    assert found.keys() == {"stock", "control", "plain", "capture one", "steer"}
    assert found["steer"] == {"ms/step": 12.0, "ratio": 1.2, "quartile 1": 1.2, "quartile 3": 1.2, "rounds": 2}


def test_rows_through_a_service_are_compared_with_the_engine() -> None:
    asked = {"stock": Engine(), "engine": Answering(Engine()), "service": Answering(Service())}
    found = dict(tier_ranks._measured(asked, REQUEST, rounds=2, seconds=60.0))
    assert found.keys() >= {"steer", "steer: service", "plain: service"}
    assert (found["steer: service"]["ratio"], found["steer: service"]["to engine"]) == (2.4, 2.0)


def test_an_engine_that_does_not_start_is_left_out() -> None:
    class Dead:
        def ask(self, **request: Any) -> float:
            raise RuntimeError("it ended")

    engines = tier_ranks._Engines({"stock": Engine(), "engine": Dead()}, lambda: None)
    engines.wait(Layout(4))
    assert engines.asked.keys() == {"stock"}
    with pytest.raises(RuntimeError, match="it ended"):
        tier_ranks._Engines({"stock": Dead()}, lambda: None).wait(Layout(4))


def test_layouts_are_sizes_and_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Model("small", "float32", gpu=False)
    assert tier_ranks.chosen_layouts(cpu, None, None) == [Layout(1), Layout(2)]
    assert tier_ranks.chosen_layouts(cpu, [1, 4], ["2x2"]) == [Layout(1), Layout(4), Layout(2, 2)]
    assert [(str(one), one.name, one.ranks) for one in (Layout.of("4"), Layout.of("2x2"), Layout.of("4x1"))] == [
        ("4", "TP 4", 4),
        ("2x2", "TP 2 × PP 2", 4),
        ("4", "TP 4", 4),
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 ranks need as many GPUs, and there are 2"):
        tier_ranks.chosen_layouts(Model("1b", "bfloat16", gpu=True), None, ["2x2"])
    with pytest.raises(ValueError, match="2y2 is no layout"):
        Layout.of("2y2")


def test_ratios_over_several_ranks_are_compared_with_one_rank() -> None:
    found = {
        "1b, TP 1, batch 32, steer": {"ratio": 1.1},
        "1b, TP 2, batch 32, steer": {"ratio": 1.21},
        "1b, TP 2, batch 32, stock": {"ms/step": 2.0},
        "1b, TP 2, batch 1, steer": {"ratio": 1.3},  # not measured at one rank
    }
    compared = tier_ranks.compared(found)
    assert compared.keys() == {"1b, TP 2, batch 32, steer: over one rank"}
    assert compared["1b, TP 2, batch 32, steer: over one rank"]["ratio"] == pytest.approx(1.1)


def test_constants_of_the_rows_travel_inside_the_trace() -> None:
    assert {name for row in tier_ranks.NAMES for name in ROWS[row].captured} == {"vector"}
