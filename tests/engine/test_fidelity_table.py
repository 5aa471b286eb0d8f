"""docs/fidelity.md says what is measured now: every location, architecture and condition, on one rank and on two.

`python -m tests.engine.test_fidelity_table` measures and writes the page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.fidelity.measure import COLUMNS, Cells
from tests.fidelity.table import Measured, differences, page, render

SECONDS = 1500
RANKS = 2


def start(folder: Path, name: str, columns: list[str], ranks: int, cores: list[int]) -> list[subprocess.Popen[str]]:
    """Start the ranks that measure columns together, each on a core; rank 0 writes to `NAME.json` in the folder."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
    }
    command = [sys.executable, "-m", "tests.fidelity.measure", str(folder / f"{name}.json"), str(folder / name)]
    return [
        subprocess.Popen(
            [*command, *columns],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=page().parents[1],
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{name}-{rank}.txt").open("w"),
            text=True,
        )
        for rank in range(ranks)
    ]


def wait(folder: Path, started: dict[str, list[subprocess.Popen[str]]]) -> dict[str, Cells]:
    """Wait for what was started, and return all that it measured; one that fails ends the others, which may wait for it."""
    ends = time.monotonic() + SECONDS
    processes = {f"{name}-{rank}": process for name, ranks in started.items() for rank, process in enumerate(ranks)}
    try:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            assert time.monotonic() < ends, [name for name, process in processes.items() if process.poll() is None]
            if any(process.poll() for process in processes.values()):
                break
        for name, process in processes.items():
            assert not process.poll(), (folder / f"{name}.txt").read_text()[-4000:]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    found: dict[str, Cells] = {}
    for name in started:
        found |= json.loads((folder / f"{name}.json").read_text())
    return found


def measured(folder: Path) -> Measured:
    """Measure all columns on one rank, half of them in one process and half in another, then on two ranks."""
    columns, cores = list(COLUMNS), sorted(os.sched_getaffinity(0))
    halves = {f"half-{i}": start(folder, f"half-{i}", columns[i::2], 1, cores[i % len(cores) :]) for i in range(2)}
    alone = wait(folder, halves)
    together = wait(folder, {"ranks": start(folder, "ranks", columns, RANKS, cores)})
    return {1: {column: alone[column] for column in columns}, RANKS: together}


@pytest.mark.timeout(2 * SECONDS)
def test_the_page_says_what_is_measured(tmp_path: Path) -> None:
    written = page().read_text()
    assert differences(written, render(measured(tmp_path), written)) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page().write_text(render(measured(Path(folder)), page().read_text()))
