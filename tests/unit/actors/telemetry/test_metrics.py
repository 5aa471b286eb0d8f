"""The names of all metrics, and the table of them in the documents."""

from __future__ import annotations

import re
from pathlib import Path

from actors.operations import WORKER_COUNTERS, WORKER_GAUGES
from actors.telemetry.metrics import METRICS, Kind, table

PAGE = Path(__file__).parents[4] / "docs" / "operating.md"


def test_names_are_as_prometheus_wants_them() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("interpose_[a-z_]+", name) and not name.endswith("_total") for name in names)
    assert all(bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM) for metric in METRICS)


def test_the_page_has_the_table_of_the_metrics() -> None:
    assert table() in PAGE.read_text()


def test_each_counter_of_the_workers_has_its_labels() -> None:
    for metric, labels in WORKER_COUNTERS.values():
        assert metric.kind is Kind.COUNTER and len(metric.labels) == 1 + len(labels)
    assert all(metric.kind is Kind.GAUGE and metric.labels == ("model",) for metric in WORKER_GAUGES.values())
