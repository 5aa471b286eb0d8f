"""The benchmarks' arithmetic, and that each of them can be run."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks import graph_steps
from benchmarks.__main__ import BENCHMARKS, table
from benchmarks.blocks import BLOCKS
from benchmarks.rounds import Measured, alternate
from benchmarks.service import latency
from benchmarks.stress import KINDS, cases, same
from benchmarks.traced_steps import CASES
from interpose.capture.rewrite import compile_block


class Scripted:
    """Stands where a benchmark's process does: answers from a list, and notes who was asked when."""

    def __init__(self, name: str, asked: list[str], answers: list[float]) -> None:
        self._name = name
        self._asked = asked
        self._answers = iter(answers)

    def ask(self, **request: Any) -> float:
        self._asked.append(self._name)
        return next(self._answers)


def test_a_ratio_is_taken_in_each_round() -> None:
    """A machine that slows down by half between rounds does not show in it; ratios of medians would give 1.5."""
    base = Measured("base", [1.0, 1.0, 2.0, 4.0, 8.0])
    other = Measured("other", [1.1, 1.2, 2.6, 3.6, 8.0])
    ratio = other.over(base)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.0, 1.1, 1.2))
    assert ratio.figures() == {"ratio": ratio.median, "quartile 1": ratio.low, "quartile 3": ratio.high}


def test_a_ratio_needs_the_same_rounds() -> None:
    with pytest.raises(ValueError):
        Measured("other", [1.0, 1.0]).over(Measured("base", [1.0, 1.0, 1.0]))


def test_the_first_round_warms_up_and_is_left_out() -> None:
    asked: list[str] = []
    cases: list[Any] = [(name, Scripted(name, asked, [99.0, 1.0, 2.0, 3.0]), {}) for name in "ab"]
    measured = alternate(cases, rounds=3)
    assert [(one.name, one.seconds, one.median) for one in measured] == [
        ("a", [1.0, 2.0, 3.0], 2.0),
        ("b", [1.0, 2.0, 3.0], 2.0),
    ]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_case_has_every_place_equally_often(count: int) -> None:
    asked: list[str] = []
    names = "abcde"[:count]
    cases: list[Any] = [(name, Scripted(name, asked, [1.0] * 100), {}) for name in names]
    alternate(cases, rounds=2 * count)
    rounds = [asked[start : start + count] for start in range(count, len(asked), count)]
    assert all(sorted(one) == list(names) for one in rounds)
    for place in range(count):
        assert set(Counter(one[place] for one in rounds).values()) == {2}


def test_latency_in_milliseconds() -> None:
    assert latency([number / 1000 for number in range(101)]) == pytest.approx({"p50 ms": 50.0, "p95 ms": 95.0})


def test_a_table_has_a_line_for_each_case() -> None:
    lines = table({"one": {"ratio": 1.02345, "ms": 3.0}, "another": {"ms": 4.0}}).splitlines()
    assert lines == ["  one      ratio 1.023     ms 3", "  another  ms 4"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_run(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert not inspect.signature(module.run).parameters
    assert (module.__doc__ or "").splitlines()[0].endswith(".")


def test_every_case_has_a_block_that_compiles() -> None:
    used = {block for cases in CASES.values() for block in cases.values() if block}
    used |= {block for group in graph_steps.GROUPS for _, block in group.blocks.values() if block}
    assert used <= BLOCKS.keys()
    for name, source in BLOCKS.items():
        compile_block(source, f"<{name}>", 1, 0, frozenset({"tracer"}))


def test_a_crowd_has_cases_of_every_kind_and_the_same_every_time() -> None:
    known = cases(3, 2 * len(KINDS))
    assert Counter(case.kind for case in known) == dict.fromkeys(KINDS, 2)
    assert known == cases(3, 2 * len(KINDS))
    assert known != cases(4, 2 * len(KINDS))


def test_outcomes_agree_to_the_tolerance_and_in_kind() -> None:
    values = [torch.zeros(2), 7]
    assert same(values, [torch.full((2,), 1e-5), 7])
    assert not same(values, [torch.full((2,), 1e-2), 7])
    assert not same(values, [torch.zeros(3), 7])
    assert not same(values, [torch.zeros(2), 8])
    assert not same(values, values[:1])
    assert not same(values, ("InterventionError", "x"))
    assert same(("InterventionError", "x"), ("InterventionError", "x"))
    assert not same(("InterventionError", "x"), ("InterventionError", "y"))
