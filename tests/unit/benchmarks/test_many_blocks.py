"""The different blocks of the benchmark of many blocks, and its arithmetic."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.many_blocks import Phase, figures, percentile, source
from executor.core.programs import Unit
from executor.plan.eligible import regions


def test_no_two_blocks_have_the_same_text_and_each_can_be_a_plan() -> None:
    texts = [source(number, 16) for number in range(2008)]
    assert len(set(texts)) == len(texts)
    for text in texts[:60]:
        assert len(regions(Unit("block", text, "<block>", 1, 0, tracers=("tracer",)))) == 1


def test_a_stall_is_what_a_request_adds_to_the_usual_time() -> None:
    phase = Phase()
    phase.take({"gaps": [0.002, 0.002, 0.002, 0.05], "longest": [0.002, 0.05], "memory": {"host": 1}})
    found = phase.figures(usual=0.002)
    assert found["p50 ms"] == pytest.approx(2.0)
    assert found["longest ms"] == pytest.approx(50.0)
    assert found["stall p50 ms"] == pytest.approx(24.0)
    assert found["requests"] == 2
    assert percentile(list(range(101)), 99) == pytest.approx(99.0)


def test_memory_is_shown_before_during_and_after_the_different_blocks() -> None:
    sizes = iter(itertools.count(100, 10))

    def phase(chunks: int) -> Phase:
        made = Phase()
        for _ in range(chunks):
            made.take({"gaps": [0.001] * 4, "longest": [0.001, 0.003], "memory": {"host": next(sizes) << 20}})
        return made

    rows = figures({"plain requests": phase(1), "known blocks": phase(1), "different blocks": phase(5)})
    assert rows["memory, host"] == {"before MiB": 110, "half MiB": 140, "after MiB": 160, "most MiB": 160}
    assert rows["between tokens, beside different blocks"]["stall p99 ms"] == pytest.approx(2.0)
