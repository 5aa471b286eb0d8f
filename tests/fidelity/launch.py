"""Starts the ranks of each layout and gathers what they measured; each is a fork of this process, which imports for all.

This process itself computes nothing and starts no thread, so its forks begin as fresh ones do, without the seconds that an
engine's imports take.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from vllm import LLM  # noqa: F401, with all that an engine needs
from vllm.utils.import_utils import resolve_obj_by_qualname

from benchmarks.layouts import Layout
from executor.plugin.config import trace_options
from tests.engine.harness import Limits
from tests.fidelity.measure import Cells, Known, as_file, measure
from tests.fidelity.suite import Job

SECONDS = 1500
_fork = multiprocessing.get_context("fork")
# layout → column → its cells
Measured = dict[Layout, dict[str, Cells]]


def run(jobs: Sequence[Job], folder: Path) -> Measured:
    """Measure.

    Args:
        jobs: what; one layout after the other.
        folder: for checkpoints, truths, results and logs.

    Raises:
        RuntimeError: a rank failed, or took too long; with the end of what it wrote.
    """
    import_for_all()
    cores = len(os.sched_getaffinity(0))
    columns = list(dict.fromkeys(column for job in jobs for column in job.columns))
    together(folder, {f"truth-{i}": [partial(_know, folder, columns[i::cores])] for i in range(cores)})
    found: Measured = {}
    for job in jobs:
        groups = _groups(job, folder, cores)
        together(folder, {result.stem: ranks for result, ranks in groups.items()})
        cells: dict[str, Cells] = {}
        for result in groups:
            cells |= json.loads(result.read_text())
        found[job.layout] = {column: cells[column] for column in job.columns}
    return found


def import_for_all() -> None:
    """Import what the ranks need, before they are forked."""
    resolve_obj_by_qualname(trace_options(Limits)["worker_cls"])


def _groups(job: Job, folder: Path, cores: int) -> dict[Path, list[Callable[[], None]]]:
    """Return the ranks that work together, by the file they write to; engines of one rank run side by side."""
    side_by_side = min(cores, len(job.columns)) if job.layout.ranks == 1 else 1
    columns = list(job.columns.items())
    groups = {}
    for i in range(side_by_side):
        result = folder / f"{as_file(job.layout.name)}-{i}.json"
        share = dict(columns[i::side_by_side])
        groups[result] = [partial(measure, folder, share, job.layout, result, job.rows)] * job.layout.ranks
    return groups


def _know(folder: Path, columns: list[str]) -> None:
    for column in columns:
        Known.write(folder, column)


def together(folder: Path, groups: dict[str, list[Callable[[], None]]]) -> None:
    """Run groups of ranks, all at the same time; one that fails ends the others, which may wait for it.

    Args:
        folder: for what the ranks write, a file each.
        groups: what each rank does, by the name of its group.

    Raises:
        RuntimeError: a rank failed, or took too long; with the end of what it wrote.
    """
    processes = {
        f"{name}-{rank}": _fork.Process(target=_enter, args=(folder / f"{name}-{rank}.txt", rank, len(ranks), work))
        for name, ranks in groups.items()
        for rank, work in enumerate(ranks)
    }
    ends = time.monotonic() + SECONDS
    try:
        for process in processes.values():
            process.start()
        while any(process.exitcode is None for process in processes.values()):
            time.sleep(0.05)
            for name, process in processes.items():
                if process.exitcode or time.monotonic() > ends:
                    how = "failed" if process.exitcode else "took too long"
                    raise RuntimeError(f"{name} {how}:\n{(folder / f'{name}.txt').read_text()[-4000:]}")
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join()


def _enter(log: Path, rank: int, ranks: int, work: Callable[[], None]) -> None:
    """Begin as one rank of several, in a process of its own."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    # There are as many ranks as cores, or more, and they wait for each other without sleep.
    torch.set_num_threads(1)
    work()
