"""The benchmarks' arithmetic, and that each of them can be run."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import multiprocessing
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import graph_steps, plain_steps, processes, rounds, start_up, tensor_parallel
from benchmarks.__main__ import BENCHMARKS, chosen, options_of, run_of, table
from benchmarks.blocks import BLOCKS
from benchmarks.models import Model, prompts
from benchmarks.pages import END
from benchmarks.peers_table import BEGIN, with_table
from benchmarks.rounds import Measured, alternate
from benchmarks.service import latency
from benchmarks.soak import Memory
from benchmarks.stress import KINDS, cases, same
from benchmarks.traced_steps import CASES
from interpose.capture.rewrite import compile_block

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SHOWN = re.compile(r"python -m (benchmarks[^`\n]*)")


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


def test_no_round_begins_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are run whatever they take: one has no quartiles."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(rounds.time, "monotonic", lambda: float(next(clock)))
    asked: list[str] = []
    cases: list[Any] = [(name, Scripted(name, asked, [1.0] * 100), {}) for name in "ab"]
    assert [len(one.seconds) for one in alternate(cases, 8, warm_up=False, seconds=35.0)] == [5, 5]
    assert [len(one.seconds) for one in alternate(cases, 8, warm_up=False, seconds=0.0)] == [2, 2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_run(name: str) -> None:
    """With no argument, or with those of the command line."""
    parameters = inspect.signature(run_of(name)).parameters.values()
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is None for one in parameters)
    assert (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0].endswith(".")


def test_options_reach_the_benchmarks_that_take_them() -> None:
    line = "tensor_parallel start_up --tensor-parallel-size 1 2 4 --model 1b --dtype bfloat16 --rounds 8"
    args, given = chosen(line.split())
    assert args.names == ["tensor_parallel", "start_up"]
    assert given == {"tensor_parallel_sizes": [1, 2, 4], "model": "1b", "dtype": "bfloat16", "rounds": 8}
    assert given.keys() == set(options_of("tensor_parallel"))
    assert chosen([])[0].names == [name for name in BENCHMARKS if name != "fuzz"]
    line = "tier_ranks --tensor-parallel-size 1 4 --layout 2x2 --service --seconds 480"
    assert chosen(line.split())[1] == {
        "tensor_parallel_sizes": [1, 4],
        "layouts": ["2x2"],
        "service": True,
        "seconds": 480.0,
    }
    assert chosen("fuzz --messages 7 --seed 3".split())[1] == {"messages": 7, "seed": 3}


@pytest.mark.parametrize(
    "line",
    [
        "plain_decode --rounds 3",
        "tensor_parallel --case batch",
        "tensor_parallel --layout 2x2",
        "tier_ranks --layout 2x",
        "nothing",
        "start_up --rounds 0",
        "start_up --rounds 1",
        "start_up --model 2b",
    ],
)
def test_what_a_benchmark_does_not_take_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chosen(line.split())
    assert ended.value.code == 2
    assert re.search("does not take|no such|is not a count|is no layout|invalid choice", capsys.readouterr().err)


def test_the_documents_commands_can_be_typed() -> None:
    shown = [command for path in DOCUMENTS for command in SHOWN.findall(path.read_text())]
    for command in shown:
        module, *arguments = shlex.split(command.split(" #")[0])
        if module == "benchmarks":
            chosen([one for one in arguments if one != "--help"])  # exits where it does not fit
        else:
            assert ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file()
    assert {command.split()[1] for command in shown if command.startswith("benchmarks ")} >= {
        "graph_steps",
        "tensor_parallel",
        "start_up",
    }


def test_no_prompt_has_the_beginning_of_another() -> None:
    some = list(islice(prompts(6), 1000))
    assert {len(prompt) for prompt in some} == {6}
    assert len({tuple(prompt[:4]) for prompt in some}) == 1000
    assert all(5 <= token < 405 for prompt in some for token in prompt)


def test_layouts_that_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Model("small", "float32", gpu=False).layouts(None) == [1, 2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    gpus = Model("1b", "bfloat16", gpu=True)
    assert gpus.layouts(None) == [1, 2]
    assert gpus.layouts([2]) == [2]
    with pytest.raises(ValueError, match="4 ranks need as many GPUs, and there are 3"):
        gpus.layouts([1, 4])


def test_starts_are_measured_by_stage_and_kind() -> None:
    asked: list[str] = []

    class Starting:
        def ask(self, executor: str) -> dict[str, float]:
            asked.append(executor)
            return {"actors": 1.0 if executor == "lazy" else 4.0, "workers": 8.0}

    measured = start_up._starts(Starting(), 2, rounds=3, seconds=60.0)
    assert Counter(asked) == {"stock": 6, "lazy": 3}
    assert measured["actors", "lazy"].over(measured["actors", "stock"]).median == 0.25
    assert measured["workers", "stock again"].seconds == [8.0] * 3
    assert len(start_up._starts(Starting(), 2, rounds=9, seconds=0.0)["workers", "lazy"].seconds) == 2


def test_plain_steps_are_held_against_those_without_our_code() -> None:
    asked: list[dict[str, Any]] = []

    class Engine:
        def ask(self, **request: Any) -> list[float]:
            asked.append(request)
            return [2.0, 2.0 if request["control"] else 3.0]

    engine: Any = Engine()
    rows = plain_steps._measured(engine, 32, 4, 1000.0)
    assert rows["batch 32, off"] == {"ms/step": 2000.0, "rounds": 4.0}
    assert rows["batch 32, off again"]["ratio"] == 1.0
    assert rows["batch 32, on"]["ratio"] == 1.5
    # Either begins in every second round, and a round warms up.
    assert [(one["first"], one["control"]) for one in asked[1:5]] == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert len(asked) == 9


def test_an_engine_is_found_without_its_title() -> None:
    context = multiprocessing.get_context("spawn")
    running = context.Barrier(2)
    spawned = context.Process(target=running.wait)
    spawned.start()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # Before that it may still have the command line of the process that forked it.
        while not running.n_waiting and spawned.is_alive():
            time.sleep(0.01)
        assert processes.ENGINE in processes.title(psutil.Process(spawned.pid))
        assert processes.ENGINE not in processes.title(psutil.Process(other.pid))
    finally:
        spawned.kill()
        spawned.join()
        other.communicate()


def test_what_is_saved_is_counted_as_bytes_per_second() -> None:
    base = Measured("stock", [0.5, 0.5])
    assert tensor_parallel._figures(base, base, 0) == {"ms": 500.0}
    figures = tensor_parallel._figures(Measured("saved", [2.0, 2.0]), base, 64 << 20)
    assert figures == {"ms": 2000.0, "ratio": 4.0, "quartile 1": 4.0, "quartile 3": 4.0, "MiB/s": 32.0}


def test_every_case_has_a_block_that_compiles() -> None:
    used = {block for cases in CASES.values() for block in cases.values() if block}
    groups = [group for case in graph_steps.CASES.values() for group in case]
    used |= {block for group in groups for _, block in group.blocks.values() if block}
    assert used <= BLOCKS.keys()
    for name, source in BLOCKS.items():
        compile_block(source, f"<{name}>", 1, 0, frozenset({"tracer"}))
    assert {trace for group in tensor_parallel.GROUPS.values() for trace in group.traces.values()} == set(
        tensor_parallel.TRACES
    )


def test_cases_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines' start counts, and what a group leaves is the next one's."""
    now = 0.0
    monkeypatch.setattr(graph_steps.time, "monotonic", lambda: now)

    class Engine:
        def stop(self) -> None: ...

        def close(self) -> None: ...

    shares: list[float] = []

    class Timed(graph_steps._Bench):
        def _start(self, engines: int) -> Any:
            nonlocal now
            now += 50.0
            return {("stock", 0): Engine()}

        def _group(self, number: int, children: Any, rounds: int, seconds: float) -> None:
            nonlocal now
            shares.append(seconds)
            now += 25.0

    group = graph_steps.Group(1, 4, ("stock",), {})
    Timed({"one": (group,), "other": (group,)}, "", {}, 8).measure(engines=2, rounds=0, seconds=250.0)
    assert shares == [100.0, 175.0]  # (250 - 50) / 2, and what is left of it


def test_engines_of_a_kind_share_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them start at the same time; those that plain requests are not measured with are one of a kind."""
    started: list[tuple[str, dict[str, Any]]] = []

    class Started:
        def __init__(self, module: str, kind: str, checkpoint: str, options: str) -> None:
            started.append((kind, json.loads(options)))

        def ask(self, **request: Any) -> float:
            assert len(started) == 10
            return 0.0

    monkeypatch.setattr(graph_steps, "Child", Started)
    children = graph_steps._Bench(graph_steps.CASES, "", {"gpu_memory_utilization": 0.15}, tokens=8)._start(3)
    several = set(itertools.product(("stock", "control", "interpose"), range(3)))
    assert children.keys() == several | {("stock eager", 0)}
    assert Counter(kind for kind, _ in started) == {"stock": 7, "interpose": 3}
    assert all(options["gpu_memory_utilization"] == pytest.approx(0.09) for _, options in started)
    assert sum(options.get("enforce_eager", False) for _, options in started) == 1

    started.clear()
    monkeypatch.setattr(Started, "ask", lambda self, **request: 0.0)
    cases = {"plain": graph_steps.CASES["plain"]}
    assert graph_steps._Bench(cases, "", {"gpu_memory_utilization": 0.15}, tokens=8)._start(3).keys() == several


def test_of_several_engines_the_median_counts_in_each_round() -> None:
    seconds = {"stock": [[1.0, 2.0], [2.0, 8.0], [9.0, 4.0]], "interpose": [[3.0, 4.0], [2.0, 9.0], [4.0, 2.0]]}
    children: Any = {(kind, i): Scripted(kind, [], one) for kind, each in seconds.items() for i, one in enumerate(each)}
    group = graph_steps.Group(1, 2, ("stock",), {"plain": (0, "")}, False, several=True)
    bench = graph_steps._Bench({"plain": (group,)}, "", {}, 8)
    bench._group(0, children, rounds=2, seconds=60.0)
    assert [one.seconds for one in bench._measured.values()] == [[2.0, 4.0], [3.0, 4.0]]
    assert bench.figures()["plain: batch 1, plain"]["ratio"] == 1.25


def test_with_blocks_one_engine_of_a_kind_is_asked() -> None:
    asked: list[str] = []
    children: Any = {("stock", i): Scripted(f"stock {i}", asked, [1.0, 1.0]) for i in range(2)}
    children |= {("interpose", i): Scripted(f"interpose {i}", asked, [2.0, 2.0]) for i in range(2)}
    group = graph_steps.Group(1, 2, ("stock",), {"a block": (1, "capture one layer, prompt")}, False)
    bench = graph_steps._Bench({"one-request": (group,)}, "", {}, 8)
    bench._group(0, children, rounds=2, seconds=60.0)
    assert set(asked) == {"stock 0", "interpose 0"}


def test_a_row_says_what_was_measured_beside_it() -> None:
    """The stock engines are the same in all groups, and each ratio is to the one of the same rounds."""
    seconds = {"stock": 1.0, "control": 2.0, "stock eager": 3.0, "interpose": 4.0}
    asked: list[str] = []
    children: Any = {(name, 0): Scripted(name, asked, [took] * 20) for name, took in seconds.items()}
    measured = {case: graph_steps.CASES[case] for case in ("batch", "plain")}
    bench = graph_steps._Bench(measured, "", {}, tokens=8)
    for number in range(3):
        bench._group(number, children, rounds=2, seconds=60.0)
    rows = bench.figures()
    assert {name: row.get("ratio") for name, row in rows.items()} == {
        "batch: batch 32, stock beside 31 plain beside 1 captured": None,
        "batch: batch 32, control beside 31 plain beside 1 captured": 2.0,
        "batch: batch 32, stock eager beside 31 plain beside 1 captured": 3.0,
        "batch: batch 32, 31 plain beside 1 captured": 4.0,
        "plain: batch 1, stock beside plain": None,
        "plain: batch 1, control beside plain": 2.0,
        "plain: batch 1, plain": 4.0,
        "plain: batch 32, stock beside plain": None,
        "plain: batch 32, control beside plain": 2.0,
        "plain: batch 32, plain": 4.0,
    }
    assert rows["plain: batch 32, plain"]["ms/step"] == rows["plain: batch 32, plain"]["fastest"] == 500.0
    assert all(row["rounds"] == 2 for row in rows.values())


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


def test_memory_that_grows_is_noticed_and_what_comes_and_goes_is_not() -> None:
    mib = 1 << 20
    steady = Memory("a", [(5.0 * i, (900 + 20 * (i % 3)) * mib) for i in range(40)])
    loading = Memory("b", [(5.0 * i, min(100 * i, 900) * mib) for i in range(40)])
    growing = Memory("c", [(5.0 * i, (500 + 5 * i) * mib) for i in range(40)])
    assert [one.flat for one in (steady, loading, growing)] == [True, True, False]
    assert growing.seconds == 195 and growing.growth == (622.5 * mib, 672.5 * mib)


def test_the_table_of_peers_is_made_from_the_results_with_losing_rows() -> None:
    figures = {"ms/step": 3.0, "ratio": 1.5, "quartile 1": 1.4, "quartile 3": 1.75, "rounds": 4}
    results = {
        "plain, batch 1: stock": {"ms/step": 2.0, "rounds": 4},
        "plain, batch 1: interpose": figures,
        "plain, batch 1: nnsight-taps": {**figures, "ratio": 1.25},
    }
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    made = with_table(page, results)
    assert "| plain, batch 1 | 2.00 | not measured | not measured | 1.5 (1.4 to 1.75) | 1.25 (1.4 to 1.75) |" in made
    assert "old" not in made
    assert made.startswith("before\n")
    assert made.endswith(f"{END}\nafter\n")
    assert with_table(made, results) == made
    with pytest.raises(ValueError, match="has no lines"):
        with_table("no marks", results)
