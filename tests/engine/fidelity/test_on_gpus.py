"""The measurement of GPUs, on CPUs: the same processes, with vLLM's first model runner."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fidelity.measure import CHANGED
from tests.fidelity.on_gpus import RUNS, Run, measure_all, wrong
from tests.fidelity.recorded import RECORDED, record, summary, written_on
from tests.fidelity.table import page

COLUMN = "gpt2"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run measures of one column."""
    [run] = [run for run in RUNS if run.name == "V1, one rank"]
    [(measured, found)] = measure_all([run], [COLUMN], tmp_path_factory.mktemp("measured"), gpus=0).items()
    assert measured is run
    return found


@pytest.fixture
def recorded_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is recorded, which a test may add to."""
    copied = tmp_path / RECORDED.name
    copied.write_text(RECORDED.read_text())
    monkeypatch.setattr("tests.fidelity.recorded.RECORDED", copied)
    return copied


def test_what_is_measured_is_recorded_and_agrees_with_the_page(found: dict[str, Any], recorded_elsewhere: Path) -> None:
    run = Run("V1, here", "measure", "0")
    recorded = record("two cores", run.name, run.ranks, found)
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


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"one, of no program failed:\n.*No module named tests.fidelity.nothing"):
        measure_all([Run("one, of no program", "nothing", "0", ranks=2)], [], tmp_path, gpus=0)


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


def _summaries(found: dict[str, Any]) -> dict[str, Any]:
    written = written_on(page().read_text(), 1)
    return {"columns": {column: summary(cells, written[column]) for column, cells in found.items()}}
