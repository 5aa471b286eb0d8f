"""Measures on the GPUs that there are what `tests.fidelity` measures on CPUs, and records it on the page of fidelity.

`python -m tests.fidelity.on_gpus [RUN…]` measures with both of vLLM's model runners, in float32 and in bfloat16, in each layout
of `OVER` that there are GPUs for; or the runs that are named. `--layout LAYOUT…` measures the runs of these layouts, `--columns
COLUMN…` these architectures: each that the page has of the layout. All run side by side, and all processes end after `--seconds`.

It ends with status 1 if a location or a change is further off than it may be, or is given or refused otherwise than on the page;
or if a process failed, or the time ended before all was measured. What was measured is recorded all the same, and the page says
it. Columns that a run measured with the same GPUs and versions on the same day stay, so that a second call can measure the rest.
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
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.layouts import Layout
from tests.conftest import ENVIRONMENT
from tests.fidelity.layouts import ONE_RANK

SECONDS = 1500.0
ATTENTION = "attention in the backend that vLLM chooses (in Triton's with full float32 products)"  # TRITON_F32_DEFAULT
CORES = 2  # that a process of a measurement keeps busy: the engine's kernels are short, and its Python is one thread


@dataclass(frozen=True)
class Run:
    """One measurement of all columns.

    Attributes:
        name: on the page.
        program: of this package.
        runner: vLLM's choice of the model runner.
        layout: of the engine; each rank has a GPU of its own.
    """

    name: str
    program: str
    runner: str
    layout: Layout = ONE_RANK


# What the page calls the layouts of the runs. Both runners serve each of them.
OVER = {
    ONE_RANK: "one rank",
    Layout(2, 1): "2 tensor-parallel ranks over NCCL",
    Layout(4, 1): "4 tensor-parallel ranks over NCCL",
    Layout(2, 2): "TP 2 × PP 2 over NCCL",
}
RUNS = [
    Run(f"{runner}, {over}{half}", program, chosen, layout)
    for program, half in (("measure", ""), ("half", ", bfloat16"))
    for layout, over in OVER.items()
    for runner, chosen in (("V2", "1"), ("V1", "0"))
]


@dataclass
class Measured:
    """What was measured, and what was not.

    Attributes:
        found: what the run's program writes of each column that it measured.
        failed: why columns are missing.
    """

    found: dict[Run, dict[str, Any]]
    failed: list[str] = field(default_factory=list)


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
        self._columns = columns
        self._result = folder / f"run-{number}.json"
        program = ["-m", f"tests.fidelity.{run.program}", str(self._result), str(folder), run.layout.name]
        ranks = run.layout.ranks
        common = {
            **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "VLLM_USE_V2_MODEL_RUNNER": run.runner,
            "OMP_NUM_THREADS": str(threads),
        }  # fmt: skip
        if gpus:
            first = number % (gpus // ranks) * ranks
            common["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + rank) for rank in range(ranks))
        self._ranks = {}
        for rank in range(ranks):
            log = folder / f"run-{number}-{rank}.txt"
            with log.open("w") as written:
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._ranks[log] = subprocess.Popen(
                    [sys.executable, *program, *columns],
                    env=environment,
                    cwd=Path(__file__).parents[2],
                    stdout=written,
                    stderr=written,
                )

    def ended(self) -> bool:
        """Whether all ranks have ended."""
        return all(process.poll() is not None for process in self._ranks.values())

    def failed(self) -> str:
        """Return the end of what a rank that has failed wrote, "" if none has."""
        for log, process in self._ranks.items():
            if process.poll():
                return f"{self.run.name} failed:\n{log.read_text()[-4000:]}"
        return ""

    def missing(self) -> list[str]:
        """Return the columns of which nothing was measured."""
        found = self.found()
        return [column for column in self._columns if column not in found]

    def leave(self, columns: Sequence[str]) -> None:
        """Leave columns to another group."""
        self._columns = [column for column in self._columns if column not in columns]

    def found(self) -> dict[str, Any]:
        """Return what was measured of each column, as far as the ranks came."""
        found: dict[str, Any] = json.loads(self._result.read_text()) if self._result.exists() else {}
        return found

    def end(self) -> None:
        """End the ranks that run."""
        for process in self._ranks.values():
            process.kill()
            process.wait()


def measure_all(
    runs: Sequence[Run], columns: Sequence[str], folder: Path, gpus: int, seconds: float = SECONDS
) -> Measured:
    """Measure columns in all runs, side by side.

    A rank that fails ends the ranks that it works with. New ones measure the columns behind the one that failed, and the other
    groups go on.

    Args:
        runs: which.
        columns: which; of each run those that the page has of its layout.
        folder: for checkpoints, truths, results and logs.
        gpus: how many there are; none: on CPUs.
        seconds: after which all processes end.
    """
    ends = time.monotonic() + seconds
    cores = len(os.sched_getaffinity(0))
    # Once, and not in the processes that measure, which would be those of one model for different runs.
    with ProcessPoolExecutor(max(1, cores // CORES), mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_know, folder), columns))
    shares = max(1, min(len(columns), cores // CORES // sum(run.layout.ranks for run in runs)))
    measured = Measured({run: {} for run in runs})
    groups: list[Group] = []

    def start(run: Run, mine: Sequence[str]) -> Group:
        groups.append(Group(run, mine, folder, len(groups), gpus, threads=CORES))
        return groups[-1]

    try:
        for run in runs:
            known = [column for column in columns if column in columns_of(run.layout)]
            for i in range(shares):
                start(run, known[i::shares])
        working = list(groups)
        while working and time.monotonic() < ends:
            time.sleep(0.2)
            for group in working:
                if why := group.failed():
                    group.end()
                    measured.failed.append(why)
                    if rest := group.missing()[1:]:
                        working.append(start(group.run, rest))
                        group.leave(rest)
            working = [group for group in working if not group.ended()]
    finally:
        for group in groups:
            group.end()
    for group in groups:
        measured.found[group.run] |= group.found()
        if missing := group.missing():
            measured.failed.append(f"{group.run.name}: not measured: {', '.join(missing)}")
    return measured


def columns_of(layout: Layout) -> list[str]:
    """Return the columns that the page has of a layout."""
    from tests.fidelity import suite  # which reads the environment

    return suite.columns_of(layout)


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

    for column in sorted(found):
        one = recorded["columns"][column]
        rows = list(one["otherwise"])
        if run.program == "half":
            rows += too_far(found[column])
        elif one["largest"] > LARGEST:
            rows.append(f"{one['at']} is off by {one['largest']:.1e}")
        if not one["changes"] and "start" not in one:
            rows.append("no change was measured")
        for row in rows:
            yield f"{run.name}, {column}: {row}"


def chosen(names: Sequence[str], layouts: Sequence[Layout], gpus: int) -> list[Run]:
    """Return the runs of these names and layouts; if none are given, all runs that there are enough GPUs for.

    Raises:
        ValueError: there is no such run, or there are too few GPUs for it.
    """
    known = [run.name for run in RUNS]
    if unknown := set(names) - set(known):
        raise ValueError(f"there is no run {', '.join(sorted(unknown))}; there are {'; '.join(known)}")
    if unmeasured := set(layouts) - set(OVER):
        said = ", ".join(sorted(one.name for one in unmeasured))
        raise ValueError(f"no run has the layout {said}; the layouts are {', '.join(one.name for one in OVER)}")
    runs = [run for run in RUNS if (not names or run.name in names) and (not layouts or run.layout in layouts)]
    if not runs:
        raise ValueError("no run has one of these names and one of these layouts")
    if not names and not layouts:
        runs = [run for run in runs if run.layout.ranks <= gpus]
    if not runs or any(run.layout.ranks > gpus for run in runs):
        raise ValueError(f"there are {gpus} GPUs")
    return runs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "tests.fidelity.on_gpus", description="Measure on GPUs, and write docs/fidelity.md."
    )
    names = "; ".join(run.name for run in RUNS)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"as the page names it: {names}")
    parser.add_argument(
        "--layout", nargs="+", default=[], metavar="LAYOUT", help=f"of {', '.join(one.name for one in OVER)}"
    )
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help="only these, as the page names them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which what has been measured is recorded")
    return parser


def main() -> int:
    """Measure, and record it; return the exit status."""
    gpus = torch.cuda.device_count()
    known = parser()
    asked = known.parse_args()
    try:
        runs = chosen(asked.runs, [Layout.named(name) for name in asked.layout], gpus)
    except ValueError as why:
        known.error(str(why))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # They read the environment when they are imported.
    import vllm

    from tests.fidelity import recorded

    columns = list(dict.fromkeys(column for run in runs for column in columns_of(run.layout)))
    if unknown := set(asked.columns or ()) - set(columns):
        known.error(f"there is no column {', '.join(sorted(unknown))}; there are {'; '.join(columns)}")
    where = f"{torch.cuda.get_device_name()}, vLLM {vllm.__version__}, torch {torch.__version__}, {ATTENTION}"
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_all(runs, asked.columns or columns, Path(folder), gpus, asked.seconds)
    said = list(measured.failed)
    for run, found in measured.found.items():
        if not found:
            continue
        one = recorded.record(where, run.name, run.layout, found)
        most = f", at most {one['most']:.2f} times as far off as transformers" if "most" in one else ""
        largest = max(one["columns"][column]["largest"] for column in found)
        print(f"{run.name}: {len(found)} columns, largest {largest:.1e}{most}", flush=True)
        said += wrong(run, found, one)
    recorded.write_page()
    for line in said:
        print(f"wrong: {line}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
