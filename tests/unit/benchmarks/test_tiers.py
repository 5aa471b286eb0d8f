"""The rows of the benchmark of tiers, the rounds that they are measured in, and the table of the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import tiers
from benchmarks.engine_child import switched_on
from benchmarks.models import Model
from benchmarks.pages import END
from benchmarks.tier_rows import ROWS, constants
from benchmarks.tiers import GROUPS, Group, chosen
from benchmarks.tiers_table import BEGIN, with_table
from executor.core.programs import Unit
from executor.plan.eligible import regions
from executor.plan.refuse import Refused

BY_PYTHON = {"unplannable one", "unplannable all", "python one"}


class Scripted:
    """Stands where an engine's process does: each row takes its own time, or is refused with a text."""

    def __init__(self, seconds: dict[str, float | str]) -> None:
        self.seconds = seconds
        self.asked: list[dict[str, Any]] = []

    def ask(self, **request: Any) -> float | str | dict[str, Any]:
        self.asked.append(request)
        seconds = self.seconds[request["row"]]
        return {"steps": 128, "ways": {"graph": 127}} if "report" in request else seconds


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.source])
def test_rows_are_plans_as_far_as_they_say(name: str) -> None:
    """The text alone decides here; a row for Python may be refused by its text or later, by its values."""
    unit = Unit("block", ROWS[name].source, "<row>", 1, 0, tracers=("tracer",))
    try:
        found = regions(unit)
    except Refused:
        assert name in BY_PYTHON
    else:
        assert len(found) == 1


def test_every_row_is_measured_at_both_batch_sizes() -> None:
    measured = {(row, group.batch) for group in GROUPS for row in group.rows}
    assert {row for row, _ in measured} == ROWS.keys()
    assert measured >= {(row, int(batch)) for row in ROWS for _, batch in ROWS[row].goals}
    assert [group.tokens for group in GROUPS if "first token" in group.rows] == [1, 1]
    assert chosen(GROUPS, ["steer"]) == [Group(1, ("steer",), 3), Group(32, ("steer",), 4)]


def test_expected_values_are_those_of_all_steps() -> None:
    assert ROWS["capture all"].expected(16, 128) == 2048
    assert ROWS["capture one"].expected(16, 128) == 128
    assert ROWS["steer"].expected(16, 128) == 0


def test_constants_have_the_models_sizes_and_are_always_the_same() -> None:
    made = constants(64, torch.bfloat16)
    assert made["W_enc"].shape == made["W_dec"].T.shape == (64, 8192)
    assert {value.dtype for value in made.values()} == {torch.bfloat16}
    assert all(torch.equal(value, constants(64, torch.bfloat16)[name]) for name, value in made.items())


def test_settings_that_the_engine_does_not_have_are_left_out() -> None:
    def takes_plans(limits: object, plans: bool = False) -> None: ...

    def takes_both(plans: bool = False, graphs: bool = False) -> None: ...

    assert switched_on(takes_plans) == {"plans": True}
    assert switched_on(takes_both) == {"plans": True, "graphs": True}


def test_a_row_is_compared_with_stock_and_a_service_with_the_engine() -> None:
    bench = tiers._Bench(Model("1b", "bfloat16", gpu=True), joined=True)
    stock, control = Scripted({"plain": 1.0}), Scripted({"plain": 1.01})
    engine, service = Scripted({"steer": 1.05, "sae": "it failed"}), Scripted({"steer": 1.26, "sae": 2.0})
    bench.asked = {"stock": stock, "control": control, "interpose": engine, "service": service}
    bench.measure(Group(32, ("steer", "sae"), 1), rounds=2, seconds=60.0)
    rows = bench.figures
    assert rows["1b, batch 32, control beside steer"]["ratio"] == pytest.approx(1.01)
    assert rows["1b, batch 32, steer: interpose"]["ratio"] == pytest.approx(1.05)
    assert rows["1b, batch 32, steer: interpose"]["goal"] == 1.08
    assert rows["1b, batch 32, steer: service"]["to engine"] == pytest.approx(1.2)
    assert "1b, batch 32, sae: interpose" not in rows
    assert rows["1b, batch 32, sae: service"]["ratio"] == 2.0
    # Two runs prepare a row, and two rounds count.
    assert len(engine.asked) == 2 + 2 + 1
    assert engine.asked[0] == {"row": "steer", "batch": 32, "prompt_tokens": 64, "tokens": 128, "joined": True}


def test_the_table_has_rows_over_their_goal() -> None:
    figures = {"ms/step": 3.0, "ratio": 1.5, "quartile 1": 1.4, "quartile 3": 1.75, "rounds": 4}
    results = {
        "1b, batch 1, stock beside plain": {"ms/step": 2.0, "rounds": 4},
        "1b, batch 1, control beside plain": {**figures, "ratio": 0.99},
        "1b, batch 1, control beside first token": {**figures, "ratio": 1.02},
        "1b, batch 1, steer: interpose": {**figures, "goal": 1.06},
        "8b, batch 32, steer: service": {**figures, "to engine": 1.1},
    }
    made = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", results)
    none = "not measured"
    assert f"| steer | 1.5 (1.4 to 1.75); goal 1.06 | {none} | {none} | {none} |" in made
    assert f"| steer, service | {none} | {none} | {none} | 1.5 (1.4 to 1.75); 1.1 of the engine |" in made
    assert f"| control | 0.99 to 1.02 | {none} | {none} | {none} |" in made
    assert "capture" not in made and "old" not in made
    assert with_table(made, results) == made
    with pytest.raises(ValueError, match="has no lines"):
        with_table("no marks", results)
