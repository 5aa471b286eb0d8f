"""The measurement of GPUs, on CPUs: the same processes, with vLLM's first model runner."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts import Layout
from tests.fidelity.layouts import ONE_RANK
from tests.fidelity.measure import CHANGED, START
from tests.fidelity.on_gpus import RUNS, Run, chosen, measure_all, parser, wrong
from tests.fidelity.recorded import RECORDED, record, section, summary, written_on
from tests.fidelity.table import page

COLUMN = "gpt2"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run measures of one column."""
    [run] = [run for run in RUNS if run.name == "V1, one rank"]
    return _measured(run, tmp_path_factory.mktemp("measured"))


@pytest.fixture
def recorded_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is recorded, which a test may add to."""
    copied = tmp_path / RECORDED.name
    copied.write_text(RECORDED.read_text())
    monkeypatch.setattr("tests.fidelity.recorded.RECORDED", copied)
    return copied


def test_what_is_measured_is_recorded_and_agrees_with_the_page(found: dict[str, Any], recorded_elsewhere: Path) -> None:
    run = Run("V1, here", "measure", "0")
    recorded = record("two cores", run.name, run.layout, found)
    assert list(wrong(run, found, recorded)) == []
    runs = json.loads(recorded_elsewhere.read_text())
    assert runs[run.name] == recorded and runs.keys() == json.loads(RECORDED.read_text()).keys() | {run.name}
    one = recorded["columns"][COLUMN]
    changed = [
        row for row, under in found[COLUMN].items() if row.startswith(CHANGED) and float in map(type, under.values())
    ]
    assert one["changes"] == 2 * len(changed) > 10
    assert one["given"] > 80 and one["refused"] > 10 and 0 < one["largest"] < 1e-4


@pytest.mark.parametrize(
    "row, value, why",
    [
        ("final_norm.output", 2e-3, "final_norm.output, {phase} is off by 2.0e-03"),
        ("final_norm.output", "no", "final_norm.output in {phase}: given or no"),
        (CHANGED + "final_norm.output", 2e-3, CHANGED + "final_norm.output, {phase} is off by 2.0e-03"),
        (CHANGED + "final_norm.output", "no", CHANGED + "final_norm.output in {phase}: no"),
    ],
)
def test_what_is_otherwise_is_wrong(found: dict[str, Any], row: str, value: float | str, why: str) -> None:
    spoiled = copy.deepcopy(found)
    name = next(iter(spoiled[COLUMN][row]))
    spoiled[COLUMN][row][name] = value
    run = Run("V1, here", "measure", "0")
    expected = why.format(phase=name if isinstance(value, float) else name.partition(",")[0])
    assert list(wrong(run, spoiled, _summaries(spoiled))) == [f"V1, here, {COLUMN}: {expected}"]


def test_changes_that_were_not_measured_are_wrong(found: dict[str, Any]) -> None:
    none = {
        row: dict.fromkeys(under, "no") if row.startswith(CHANGED) else under for row, under in found[COLUMN].items()
    }
    run = Run("V1, here", "measure", "0")
    assert list(wrong(run, {COLUMN: none}, _summaries({COLUMN: none}))) == [
        f"V1, here, {COLUMN}: no change was measured"
    ]


def test_an_engine_that_is_refused_at_start_is_recorded(recorded_elsewhere: Path) -> None:
    run = Run("V1, here", "measure", "0")
    found = {column: {START: {"": "no such engine"}} for column in ("ernie4_5", COLUMN)}  # the page has the first so
    recorded = record("two cores", run.name, run.layout, found)
    assert list(wrong(run, found, recorded)) == [f"V1, here, {COLUMN}: the engine is refused at start: no such engine"]
    assert "| refused at start |" in section()


def test_stages_are_measured_in_bfloat16(tmp_path: Path, recorded_elsewhere: Path) -> None:
    """The last stage's first rank is told the values; float32 over stages is in `test_fidelity_table`."""
    run = Run("V1, two stages, bfloat16", "half", "0", Layout(1, 2))
    found = _measured(run, tmp_path)
    recorded = record("two cores", run.name, run.layout, found)
    assert list(wrong(run, found, recorded)) == []
    one = recorded["columns"][COLUMN]
    assert one["changes"] > 10 and one["given"] > 80 and one["refused"] > 10
    assert recorded["most"] == one["most"] > 0.5


def test_columns_of_the_same_day_stay(found: dict[str, Any], recorded_elsewhere: Path) -> None:
    whole, other = found, {"llama": found[COLUMN]}
    record("two cores", "V1, here", ONE_RANK, whole)
    assert record("two cores", "V1, here", ONE_RANK, other)["columns"].keys() == {COLUMN, "llama"}
    assert record("four cores", "V1, here", ONE_RANK, other)["columns"].keys() == {"llama"}


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    [why] = measure_all([Run("one, of no program", "nothing", "0", Layout(2, 1))], [], tmp_path, gpus=0).failed
    assert why.startswith("one, of no program failed:\n") and "No module named tests.fidelity.nothing" in why


def test_other_ranks_measure_the_columns_behind_one_that_failed(tmp_path: Path) -> None:
    for column in ("gpt2", "llama"):
        (tmp_path / f"{column}.known").touch()  # so that no truth is computed
    run = Run("one, of no program", "nothing", "0", Layout(2, 1))
    failed = measure_all([run], ["gpt2", "llama"], tmp_path, gpus=0).failed
    assert [why.partition("\n")[0] for why in failed] == [
        "one, of no program failed:",
        "one, of no program failed:",
        "one, of no program: not measured: gpt2",
        "one, of no program: not measured: llama",
    ]


def test_what_was_not_measured_in_time_is_named(tmp_path: Path) -> None:
    run = Run("one, too long", "measure", "0", Layout(2, 1))
    (tmp_path / f"{COLUMN}.known").touch()  # so that no truth is computed
    measured = measure_all([run], [COLUMN], tmp_path, gpus=0, seconds=0.0)
    assert measured.failed == [f"one, too long: not measured: {COLUMN}"]
    assert measured.found == {run: {}}


def test_runs_that_there_are_gpus_for() -> None:
    ranks = {gpus: {run.layout.ranks for run in chosen([], [], gpus)} for gpus in (1, 2, 3, 4)}
    assert ranks == {1: {1}, 2: {1, 2}, 3: {1, 2}, 4: {1, 2, 4}}
    four = chosen([], [Layout(4, 1), Layout(2, 2)], 4)
    assert len(four) == 8 and {run.layout.ranks for run in four} == {4}
    assert [run.name for run in chosen(["V2, TP 2 × PP 2 over NCCL"], [Layout(2, 2)], 4)] == [
        "V2, TP 2 × PP 2 over NCCL"
    ]
    assert len({run.name for run in RUNS}) == len(RUNS) == 16
    for layouts, names, gpus, why in (
        ([Layout(4, 1)], [], 3, "there are 3 GPUs"),
        ([Layout(4, 2)], [], 8, "no run has the layout TP 4 × PP 2"),
        ([Layout(4, 1)], ["V2, one rank"], 4, "no run has one of these names and one of these layouts"),
    ):
        with pytest.raises(ValueError, match=why):
            chosen(names, layouts, gpus)


def test_the_commands_for_four_gpus_are_those_of_the_page() -> None:
    root = page().parents[1]
    shown = re.findall(r"^python -m (.+)$", (root / "docs" / "gpu.md").read_text(), re.MULTILINE)
    made = re.findall(r"^\t\$\(WITHIN\) (.+) \|\| failed=1; \\$", (root / "Makefile").read_text(), re.MULTILINE)
    assert len(made) == 4 and made == [command for command in shown if command in made]
    measured: list[Run] = []
    for command in made[:2]:
        program, *arguments = shlex.split(command)
        asked = parser().parse_args(arguments)
        assert program == "tests.fidelity.on_gpus" and asked.seconds < 590
        measured += chosen(asked.runs, [Layout.named(name) for name in asked.layout], 4)
    assert measured == sorted((run for run in RUNS if run.layout.ranks == 4), key=lambda run: run.layout.pipeline)


def test_without_gpus_nothing_is_measured() -> None:
    command = [sys.executable, "-m", "tests.fidelity.on_gpus"]
    here = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for arguments, why in (([], "there are 0 GPUs"), (["V3, one rank"], "there is no run V3, one rank")):
        refused = subprocess.run(
            [*command, *arguments], cwd=page().parents[1], env=here, capture_output=True, text=True
        )
        assert refused.returncode == 2 and why in refused.stderr


def test_every_run_that_is_recorded_can_be_measured_again() -> None:
    assert json.loads(RECORDED.read_text()).keys() <= {run.name for run in RUNS}


def _measured(run: Run, folder: Path) -> dict[str, Any]:
    measured = measure_all([run], [COLUMN], folder, gpus=0)
    assert not measured.failed and measured.found.keys() == {run}
    return measured.found[run]


def _summaries(found: dict[str, Any]) -> dict[str, Any]:
    written = written_on(page().read_text(), ONE_RANK)
    return {"columns": {column: summary(cells, written[column]) for column, cells in found.items()}}
