"""Every location and every change gives the same bits in each tier; see `tests.fidelity.tiers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fidelity.tiers import COUNTED, MARK, PAGE, RECORDED, measure, table

# Two kinds of attention in one model, and experts.
COLUMNS = ["gemma2", "qwen3_moe"]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_tier_gives_the_same_bits(column: str, tmp_path: Path) -> None:
    found = measure(column, tmp_path, "float32")
    assert {tier: one.differ for tier, one in found.items()} == {tier: [] for tier in COUNTED}
    for tier, one in found.items():
        assert one.took >= 60, (tier, one.took, one.reasons)


def test_the_page_has_what_was_recorded() -> None:
    assert f"{MARK}\n\n{table(json.loads(RECORDED.read_text()))}\n" in PAGE.read_text()
