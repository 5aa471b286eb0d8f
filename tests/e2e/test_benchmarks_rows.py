"""The rows of `python -m benchmarks tiers --service`, each once, and that they bring the values that are counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from benchmarks.tier_rows import ROWS
from benchmarks.tier_traces import TRACES, TraceRows
from interpose.cli.demo_model import Shape
from tests.e2e.service import RunningService


@pytest.fixture(scope="module")
def rows(service: RunningService) -> Iterator[TraceRows]:
    with pytest.MonkeyPatch.context() as patch, TraceRows(lambda: service.address, "llama") as rows:
        patch.setattr("benchmarks.tier_rows.LAYER", Shape().layers - 1)
        patch.setattr("benchmarks.tier_traces.LAYER", Shape().layers - 1)
        patch.setattr("benchmarks.tier_traces.POLLING_SECONDS", 0.0)
        yield rows


@pytest.mark.parametrize("row, joined", list(itertools.product(TRACES, [False, True])))
def test_every_row_runs_through_the_service(rows: TraceRows, row: str, joined: bool) -> None:
    took = rows.ask(row=row, batch=2, prompt_tokens=16, tokens=ROWS[row].tokens or 3, joined=joined)
    assert isinstance(took, float), took
    assert took > 0


def test_all_rows_have_a_trace() -> None:
    assert TRACES.keys() == ROWS.keys()
