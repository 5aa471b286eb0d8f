"""Hands the service's metrics to Ray, whose agent on the node offers them to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util import metrics as ray_metrics

from actors.telemetry.counts import Book, Counted
from actors.telemetry.metrics import BY_NAME, Kind, Metric


class Exporter:
    """The metrics of a service, in the process that exports them.

    Attributes:
        book: the totals.
    """

    def __init__(self) -> None:
        self.book = Book()
        self._made: dict[str, Any] = {}
        self._held: dict[str, set[tuple[str, ...]]] = {}  # the labels that a gauge has had

    def enter(self, counted: Counted) -> None:
        """Add what a process counted to the totals, and export it."""
        bounded = self.book.enter(counted, BY_NAME)
        for (name, labels), value in bounded.added.items():
            metric = BY_NAME[name]
            self._of(metric).inc(value, tags=_tags(metric, labels))
        for (name, labels), value in bounded.observed:
            metric = BY_NAME[name]
            self._of(metric).observe(value, tags=_tags(metric, labels))

    def hold(self, metric: Metric, values: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge by the values of its labels.

        The values of other labels become 0.
        """
        held = self._held.setdefault(metric.name, set())
        gauge = self._of(metric)
        for labels in held - values.keys():
            gauge.set(0.0, tags=_tags(metric, labels))
        for labels, value in values.items():
            gauge.set(value, tags=_tags(metric, labels))
        held.update(values)

    def _of(self, metric: Metric) -> Any:
        if metric.name not in self._made:
            self._made[metric.name] = _ray_metric(metric)
        return self._made[metric.name]


def _tags(metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(metric.labels, labels, strict=True))


def _ray_metric(metric: Metric) -> Any:
    text = metric.text.replace("`", "")
    if metric.kind is Kind.COUNTER:
        return ray_metrics.Counter(metric.name, text, tag_keys=metric.labels)
    if metric.kind is Kind.GAUGE:
        return ray_metrics.Gauge(metric.name, text, tag_keys=metric.labels)
    return ray_metrics.Histogram(metric.name, text, boundaries=list(metric.bounds), tag_keys=metric.labels)
