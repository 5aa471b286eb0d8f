"""docs/fidelity.md says what is measured now: every location, architecture and condition, on one rank and on two.

`python -m tests.engine.test_fidelity_table` measures and writes the page.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fidelity.measure import COLUMNS
from tests.fidelity.table import Measured, differences, page, render

SECONDS = 1500
# What is measured with how many tensor-parallel ranks. Over two, `tests/e2e` has llama and gpt2.
MEASURED = {1: list(COLUMNS), 2: ["gemma2", "qwen3_moe", "llama, 1 k/v head"]}


def spread(folder: Path, columns: list[str], ranks: int) -> list[subprocess.Popen[str]]:
    """Start the ranks that measure together; rank 0 writes to `ranks-N.json` in the folder."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    common = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
    }
    command = [sys.executable, "-m", "tests.fidelity.measure", str(folder / f"ranks-{ranks}.json"), str(folder)]
    return [
        subprocess.Popen(
            [*command, *columns],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=page().parents[1],
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"rank-{ranks}-{rank}.txt").open("w"),
            text=True,
        )
        for rank in range(ranks)
    ]


def measured(folder: Path) -> Measured:
    """Measure the columns on one rank, then on two; each rank is a process of its own."""
    found: Measured = {}
    for ranks, columns in MEASURED.items():
        processes = spread(folder, columns, ranks)
        try:
            for rank, process in enumerate(processes):
                said = folder / f"rank-{ranks}-{rank}.txt"
                assert process.wait(SECONDS) == 0, said.read_text()[-4000:]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found[ranks] = json.loads((folder / f"ranks-{ranks}.json").read_text())
    return found


@pytest.mark.timeout(2 * SECONDS)
def test_the_page_says_what_is_measured(tmp_path: Path) -> None:
    assert differences(page().read_text(), render(measured(tmp_path))) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page().write_text(render(measured(Path(folder))))
