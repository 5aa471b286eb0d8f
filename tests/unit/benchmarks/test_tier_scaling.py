"""The points of the benchmark of requests and locations, and the picture of its result."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tier_scaling
from benchmarks.pages import END
from benchmarks.tier_plot import BEGIN, draw, lines_of, with_pictures
from benchmarks.tier_rows import with_locations
from executor.core.programs import Unit
from executor.plan.eligible import regions


class Engine:
    """Stands where an engine's process does: a step takes a millisecond, and one more for each location."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused

    def ask(self, row: str, locations: int = 0, **request: Any) -> dict[str, float] | str:
        if row == self.refused:
            return "it failed"
        return {"typical step": 1.0 + locations, "all": 2.0 * request["tokens"]}


@pytest.mark.parametrize("kind", tier_scaling.KINDS)
def test_a_block_works_on_as_many_layers_as_it_says(kind: str) -> None:
    row = with_locations(kind, 3)
    assert [row.source.count(f"layers[{layer}]") for layer in range(4)] == [1, 1, 1, 0]
    assert len(regions(Unit("block", row.source, "<row>", 1, 0, tracers=("tracer",)))) == 1
    assert row.expected(16, 10) == (30 if kind == "capture" else 0)


def test_each_number_of_locations_is_measured_once() -> None:
    assert tier_scaling.locations(16) == [1, 16]
    assert tier_scaling.locations(32) == [1, 16, 32]
    assert tier_scaling.locations(8) == [1, 8]


def test_points_are_ratios_to_stock_and_refused_ones_are_left_out() -> None:
    children = {"stock": Engine(), "control": Engine(), "interpose": Engine(refused="steer")}
    found = dict(tier_scaling._measured(children, 8, [1, 4], 32, rounds=2, seconds=60.0))
    assert found.keys() == {f"8 requests, {name}" for name in ("stock", "control", "capture 1", "capture 4")}
    assert found["8 requests, capture 4"]["ratio"] == pytest.approx(5.0)
    assert found["8 requests, capture 4"]["ms/step of the batch"] == pytest.approx(2.0)
    assert found["8 requests, stock"]["ms/step"] == pytest.approx(1.0)


def test_the_picture_has_every_line_and_is_shown_between_the_marks(tmp_path: Path) -> None:
    results = {
        f"1b, {count} requests, {line}": {"ms/step": 1.0 + count / 100, **({} if line == "stock" else {"ratio": 1.1})}
        for count in (1, 8, 32)
        for line in ("stock", "control", "capture 1", "capture 16", "steer 1")
    }
    lines = lines_of({**results, "of another benchmark": {"ms/step": 9.0}})
    assert lines.keys() == {"1b"}
    assert lines["1b"]["capture 16"] == {1: (1.01, 1.1), 8: (1.08, 1.1), 32: (1.32, 1.1)}
    draw(lines["1b"], "A title", tmp_path / "one.svg")
    draw(lines["1b"], "A title", tmp_path / "again.svg")
    assert xml.etree.ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "again.svg").read_text()
    page = with_pictures(f"before\n{BEGIN}\nold\n{END}\nafter\n", {"A title": "one.svg"})
    assert "![A title](one.svg)" in page and "old" not in page
    assert with_pictures(page, {"A title": "one.svg"}) == page
    with pytest.raises(ValueError, match="has no lines"):
        with_pictures("no marks", {})
