"""Counts what happens in one process, for the directory to collect.

Counting is an addition to a dictionary. The directory collects the counts of ingress replicas, session actors and engines
every few seconds, and is the only process that exports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from actors.telemetry.metrics import Kind, Metric

# The name of a metric, and the values of its labels in their order.
Series = tuple[str, tuple[str, ...]]

# Label values of one metric. Further ones are counted under `OTHER`.
MOST_SERIES = 2000
OTHER = "other"
# Observations of histograms that wait to be collected. Further ones are dropped.
MOST_OBSERVED = 20_000


@dataclass(frozen=True)
class Counted:
    """What was counted since the last collection.

    Attributes:
        added: what was added to counters.
        observed: the observations of histograms, in their order.
    """

    added: Mapping[Series, float] = field(default_factory=dict)
    observed: tuple[tuple[Series, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.observed)


class Counts:
    """The counts of one process since the last collection."""

    def __init__(self) -> None:
        self._added: dict[Series, float] = {}
        self._observed: list[tuple[Series, float]] = []

    def add(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Add to a counter.

        Args:
            labels: the values of the metric's labels, in their order.
            by: not negative.
        """
        if by > 0:
            key = metric.name, labels
            self._added[key] = self._added.get(key, 0.0) + by

    def observe(self, metric: Metric, *labels: str, value: float) -> None:
        """Add an observation to a histogram."""
        if len(self._observed) < MOST_OBSERVED:
            self._observed.append(((metric.name, labels), value))

    def take(self) -> Counted:
        """Return what was counted since the last call."""
        taken = Counted(self._added, tuple(self._observed))
        self._added, self._observed = {}, []
        return taken


class Book:
    """The totals of all processes since the directory began.

    Attributes:
        totals: the counters; of a histogram, the sum of its observations.
    """

    def __init__(self) -> None:
        self.totals: Counter[Series] = Counter()
        self._series: Counter[str] = Counter()

    def enter(self, counted: Counted, known: Mapping[str, Metric]) -> Counted:
        """Add what a process counted; return the same with its series within bounds.

        Counts of unknown metrics are dropped: another version of the service has sent them.
        """
        added: dict[Series, float] = {}
        for series, value in counted.added.items():
            if self._fits(series, known, Kind.COUNTER) and value > 0:
                bounded = self._bounded(series)
                added[bounded] = added.get(bounded, 0.0) + value
                self.totals[bounded] += value  # type: ignore[assignment]
        observed = []
        for series, value in counted.observed:
            if self._fits(series, known, Kind.HISTOGRAM):
                bounded = self._bounded(series)
                observed.append((bounded, value))
                self.totals[bounded] += value  # type: ignore[assignment]
        return Counted(added, tuple(observed))

    def of(self, metric: Metric) -> Iterable[tuple[tuple[str, ...], float]]:
        """Yield the totals of a metric with the values of its labels."""
        return ((labels, value) for (name, labels), value in self.totals.items() if name == metric.name)

    @staticmethod
    def _fits(series: Series, known: Mapping[str, Metric], kind: Kind) -> bool:
        metric = known.get(series[0])
        return metric is not None and metric.kind is kind and len(series[1]) == len(metric.labels)

    def _bounded(self, series: Series) -> Series:
        name, labels = series
        if series in self.totals:
            return series
        if self._series[name] >= MOST_SERIES:
            return name, (OTHER,) * len(labels)
        self._series[name] += 1
        return series
