"""Measures on the GPUs that there are what `tests.fidelity` measures on CPUs, and records it on the page of fidelity.

`python -m tests.fidelity.on_gpus [RUN…]` measures with both of vLLM's model runners, in float32 and in bfloat16, and over two
tensor-parallel ranks where there are two GPUs; or the runs that are named. All run side by side. It ends with status 1 if a
location or a change is further off than it may be, or is given or refused otherwise than on the page; what was measured is
recorded all the same, and the page says it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ENVIRONMENT

SECONDS = 1500
ATTENTION = "attention in the backend that vLLM chooses (in Triton's with full float32 products)"  # TRITON_F32_DEFAULT
CORES = 2  # that a process of a measurement keeps busy: the engine's kernels are short, and its Python is one thread


@dataclass(frozen=True)
class Run:
    """One measurement of all columns.

    Attributes:
        name: on the page.
        program: of this package.
        runner: vLLM's choice of the model runner.
        ranks: tensor-parallel ones, each on a GPU of its own.
    """

    name: str
    program: str
    runner: str
    ranks: int = 1


RUNS = [
    Run(f"{runner}, {over}{half}", program, chosen, ranks)
    for program, half in (("measure", ""), ("half", ", bfloat16"))
    for ranks, over in ((1, "one rank"), (2, "2 tensor-parallel ranks over NCCL"))
    for runner, chosen in (("V2", "1"), ("V1", "0"))
]


class Group:
    """The processes that measure some columns of a run: its ranks.

    Args:
        run: what they measure.
        columns: which.
        folder: has the truths; for their result and what they print.
        number: of the group, among those of all runs.
        gpus: how many there are; none: on CPUs.
        threads: of each process.
    """

    def __init__(self, run: Run, columns: Sequence[str], folder: Path, number: int, gpus: int, threads: int) -> None:
        self.run = run
        self._result = folder / f"run-{number}.json"
        command = [sys.executable, "-m", f"tests.fidelity.{run.program}", str(self._result), str(folder), *columns]
        common = {
            **os.environ, "WORLD_SIZE": str(run.ranks), "MASTER_ADDR": "127.0.0.1", "VLLM_USE_V2_MODEL_RUNNER": run.runner,
            "OMP_NUM_THREADS": str(threads),
        }  # fmt: skip
        if gpus:
            common["CUDA_VISIBLE_DEVICES"] = (
                str(number % gpus) if run.ranks == 1 else ",".join(map(str, range(run.ranks)))
            )
        self._ranks = {}
        for rank in range(run.ranks):
            log = folder / f"run-{number}-{rank}.txt"
            with log.open("w") as written:
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                root = Path(__file__).parents[2]
                self._ranks[log] = subprocess.Popen(command, env=environment, cwd=root, stdout=written, stderr=written)

    def ended(self) -> bool:
        """Whether all ranks have ended; raises RuntimeError, with the end of what it wrote, if one has failed."""
        for log, process in self._ranks.items():
            if process.poll():
                raise RuntimeError(f"{self.run.name} failed:\n{log.read_text()[-4000:]}")
        return all(process.poll() is not None for process in self._ranks.values())

    def found(self) -> dict[str, Any]:
        """Return what was measured of each column."""
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found

    def end(self) -> None:
        """End those that run."""
        for process in self._ranks.values():
            process.kill()
            process.wait()


def measure_all(runs: Sequence[Run], columns: Sequence[str], folder: Path, gpus: int) -> dict[Run, dict[str, Any]]:
    """Measure columns in all runs, side by side.

    Args:
        runs: which.
        columns: which.
        folder: for checkpoints, truths, results and logs.
        gpus: how many there are; none: on CPUs.

    Returns:
        What the run's program writes of each column.

    Raises:
        RuntimeError: a process failed, or they took too long; with the end of what it wrote.
    """
    cores = len(os.sched_getaffinity(0))
    # Once, and not in the processes that measure, which would be those of one model for different runs.
    with ProcessPoolExecutor(max(1, cores // CORES), mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_know, folder), columns))
    shares = max(1, min(len(columns), cores // CORES // sum(run.ranks for run in runs)))
    groups: list[Group] = []
    ends = time.monotonic() + SECONDS
    try:
        for run in runs:
            for i in range(shares):
                groups.append(Group(run, columns[i::shares], folder, len(groups), gpus, threads=CORES))
        while [group for group in groups if not group.ended()]:
            if time.monotonic() > ends:
                raise RuntimeError(f"it takes longer than {SECONDS} s")
            time.sleep(0.2)
    finally:
        for group in groups:
            group.end()
    found: dict[Run, dict[str, Any]] = {run: {} for run in runs}
    for group in groups:
        found[group.run] |= group.found()
    return found


def _know(folder: Path, column: str) -> None:
    from tests.fidelity.measure import Known

    torch.set_num_threads(CORES)
    Known.write(folder, column)


def wrong(run: Run, found: dict[str, Any], recorded: dict[str, Any]) -> Iterator[str]:
    """Yield what is not as it must be.

    Args:
        run: of which.
        found: what was measured of each column.
        recorded: what is recorded of it, see `tests.fidelity.recorded`.
    """
    from tests.fidelity.half import too_far
    from tests.fidelity.table import LARGEST

    for column, one in recorded["columns"].items():
        rows = list(one["otherwise"])
        if run.program == "half":
            rows += too_far(found[column])
        elif one["largest"] > LARGEST:
            rows.append(f"{one['at']} is off by {one['largest']:.1e}")
        if not one["changes"]:
            rows.append("no change was measured")
        for row in rows:
            yield f"{run.name}, {column}: {row}"


def main() -> int:
    """Measure, and record it; return the exit status."""
    gpus = torch.cuda.device_count()
    names = [run.name for run in RUNS]
    parser = argparse.ArgumentParser(
        "tests.fidelity.on_gpus", description="Measure on GPUs, and write docs/fidelity.md."
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"as the page names it: {'; '.join(names)}")
    asked = parser.parse_args()
    if unknown := set(asked.runs) - set(names):
        parser.error(f"there is no run {', '.join(sorted(unknown))}; there are {'; '.join(names)}")
    runs = [run for run in RUNS if (run.name in asked.runs if asked.runs else run.ranks <= gpus)]
    if not gpus or any(run.ranks > gpus for run in runs):
        parser.error(f"there are {gpus} GPUs")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # They read the environment when they are imported.
    import vllm

    from tests.fidelity import recorded
    from tests.fidelity.measure import COLUMNS

    where = f"{torch.cuda.get_device_name()}, vLLM {vllm.__version__}, torch {torch.__version__}, {ATTENTION}"
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_all(runs, list(COLUMNS), Path(folder), gpus)
    said = []
    for run, found in measured.items():
        one = recorded.record(where, run.name, run.ranks, found)
        most = f", at most {one['most']:.2f} times as far off as transformers" if "most" in one else ""
        largest = max(column["largest"] for column in one["columns"].values())
        print(f"{run.name}: largest {largest:.1e}{most}", flush=True)
        said += wrong(run, found, one)
    recorded.write_page()
    for line in said:
        print(f"wrong: {line}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
