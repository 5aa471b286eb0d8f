"""Counts are added up over processes, within bounds, whatever a process of another version sends."""

from __future__ import annotations

from actors.telemetry import metrics
from actors.telemetry.counts import MOST_OBSERVED, MOST_SERIES, OTHER, Book, Counted, Counts
from actors.telemetry.metrics import BY_NAME
from actors.telemetry.record import TraceRecord


def record(**fields: object) -> TraceRecord:
    given = {"tenant": "red", "model": "tiny", "session": "s", "trace": "t", "method": "trace", "outcome": "done"}
    return TraceRecord(**{**given, **fields})  # type: ignore[arg-type]


def test_what_is_taken_is_counted_once() -> None:
    counts, book = Counts(), Book()
    for _ in range(2):
        counts.add(metrics.TRACES, "red", "tiny", "trace", "done")
    counts.add(metrics.TOKENS, "red", "tiny", "prompt", by=0.0)
    counts.observe(metrics.QUEUE_SECONDS, "red", "tiny", value=0.5)
    taken = counts.take()
    assert not counts.take()
    assert book.enter(taken, BY_NAME) == taken
    book.enter(Counted({(metrics.TRACES.name, ("red", "tiny", "trace", "done")): 3.0}), BY_NAME)
    assert dict(book.of(metrics.TRACES)) == {("red", "tiny", "trace", "done"): 5.0}
    assert dict(book.of(metrics.QUEUE_SECONDS)) == {("red", "tiny"): 0.5}
    assert not dict(book.of(metrics.TOKENS))


def test_what_no_metric_has_is_dropped() -> None:
    book = Book()
    strange = {
        ("interpose_nothing", ("red",)): 1.0,
        (metrics.TRACES.name, ("red",)): 1.0,
        (metrics.SESSIONS.name, ("red",)): 1.0,
        (metrics.INVOKES.name, ("red", "tiny")): -1.0,
    }
    observed = (((metrics.TRACES.name, ("red", "tiny", "trace", "done")), 1.0),)
    assert not book.enter(Counted(strange, observed), BY_NAME)
    assert not book.totals


def test_labels_of_a_metric_are_bounded() -> None:
    book = Book()
    for number in range(MOST_SERIES + 5):
        book.enter(Counted({(metrics.INVOKES.name, (f"tenant {number}", "tiny")): 1.0}), BY_NAME)
    book.enter(Counted({(metrics.INVOKES.name, ("tenant 3", "tiny")): 1.0}), BY_NAME)
    found = dict(book.of(metrics.INVOKES))
    assert len(found) == MOST_SERIES + 1
    assert found[OTHER, OTHER] == 5.0 and found["tenant 3", "tiny"] == 2.0


def test_observations_that_nobody_collects_are_bounded() -> None:
    counts = Counts()
    for _ in range(MOST_OBSERVED + 5):
        counts.observe(metrics.QUEUE_SECONDS, "red", "tiny", value=0.5)
    assert len(counts.take().observed) == MOST_OBSERVED


def test_a_trace_is_counted_in_its_metrics() -> None:
    counts, book = Counts(), Book()
    record(invokes=2, generated_tokens=7, tiers={"plan": 3, "block": 1}, block_seconds=0.25, queued=1.0).count(counts)
    book.enter(counts.take(), BY_NAME)
    assert dict(book.of(metrics.STEPS)) == {("red", "tiny", "plan"): 3.0, ("red", "tiny", "block"): 1.0}
    assert dict(book.of(metrics.TOKENS)) == {("red", "tiny", "generated"): 7.0}
    assert dict(book.of(metrics.BLOCK_SECONDS)) == {("red", "tiny"): 0.25}
    assert dict(book.of(metrics.RUNNING_SECONDS)) == {("red", "tiny"): 0.0}
