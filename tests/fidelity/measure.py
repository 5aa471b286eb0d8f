"""Measures how far each location is from transformers: in this process, or as one of several tensor-parallel ranks.

As a program, `python -m tests.fidelity.measure RESULT FOLDER COLUMN…`, it is one rank of a model spread over processes
(RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR say which); rank 0 writes what it measured to RESULT as JSON.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.options import prepare_environment
from interpose.cli.demo_model import ARCHITECTURES, Shape, write_demo_model
from tests.engine.harness import Block, Limits, LocalEngine
from tests.fidelity.changes import changed
from tests.fidelity.places import Place, Truth, places_of
from tests.fidelity.ranks import LaunchedRank
from tests.oracle import Oracle, difference

# Two layers show both kinds of those that alternate; two key/value heads are spread over two ranks, four over four.
SHAPE = Shape(layers=2, hidden=128, context=256)
# What is measured, by the name of its column: an architecture and its sizes.
COLUMNS = {arch: (arch, SHAPE) for arch in sorted(ARCHITECTURES)}
COLUMNS["llama, 1 k/v head"] = ("llama", replace(SHAPE, kv_heads=1))  # ranks hold copies of the head
PHASES = ("prefill", "decode")
STEPS = len(PHASES)
BLOCK = 32  # of the cache: a prompt longer than this can come from it
LONG = [5 + 7 * i % 480 for i in range(41)]
PROMPTS = [LONG, [3, 77], [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19], [222], *([i, 9 * i, 4] for i in range(20, 24))]
BESIDE = [[(11 * i + 3) % 490 for i in range(150)], LONG]  # one is cut into chunks where prompts are
STEP_TOKENS = 64

# The same experts in any order.
SETS = ("].mlp.experts", "].mlp.expert_weights")


@dataclass(frozen=True)
class Scheduling:
    """How the engine schedules: whether it cuts prompts into chunks, and whether it caches them."""

    chunked: bool
    cached: bool

    @property
    def name(self) -> str:
        return f"{'chunked' if self.chunked else 'whole'}, {'prefix cache' if self.cached else 'no prefix cache'}"


COMPANY = {"alone": [0], "8 concurrent": list(range(len(PROMPTS)))}  # the prompts that are traced at the same time
SCHEDULINGS = [Scheduling(chunked, cached) for chunked in (False, True) for cached in (False, True)]
# row → condition → error or refusal
Cells = dict[str, dict[str, float | str]]


def conditions() -> list[str]:
    """Return the names of the conditions that every location is measured under."""
    return [
        f"{phase}, {company}, {scheduling.name}"
        for phase in PHASES
        for company in COMPANY
        for scheduling in SCHEDULINGS
    ]


SOURCE = """\
values, refused = {{}}, {{}}
places = {{
{places}
}}
for step in tracer.iter[:{steps}]:
    for i, place in places.items():
        try:
            values[i, step] = place()
        except Exception as error:
            refused[i, step] = str(error)
values.save()
refused.save()
"""


class Measurement:
    """One architecture's engine and truth.

    Args:
        checkpoint: the model.
        ranks: the tensor-parallel size.
        reports: whether this process is told the values; one rank is.
    """

    def __init__(self, checkpoint: Path, ranks: int, reports: bool) -> None:
        spread = {"tensor_parallel_size": ranks, "distributed_executor_backend": LaunchedRank} if ranks > 1 else {}
        self.engine = LocalEngine(
            checkpoint,
            dtype="float32",
            block_size=BLOCK,
            enable_prefix_caching=True,
            max_num_batched_tokens=256,
            **spread,
        )
        self.places = places_of(checkpoint, self.engine.worker.interpose_tree)
        self._oracle = oracle = Oracle(checkpoint) if reports else None
        self._truth = [Truth.of(oracle, prompt, STEPS) for prompt in PROMPTS] if oracle is not None else None

    def cells(self) -> Cells:
        """Return the largest error of each row under each condition, or the message it was refused with."""
        changes = changed(self.engine, self.places, self._oracle, PHASES)
        cells: Cells = {f"changed: {row}": phases for row, phases in changes.items()}
        for scheduling in SCHEDULINGS:
            self.engine.reschedule(scheduling.chunked, scheduling.cached, STEP_TOKENS if scheduling.chunked else 256)
            if scheduling.cached:
                self.engine.plain(LONG)
            for company, prompts in COMPANY.items():
                sampling = {"max_tokens": STEPS, "ignore_eos": True}
                blocks = [[Block(PROMPTS[i], self._source(i), sampling)] for i in prompts]
                plain = tuple(BESIDE) if company != "alone" else ()
                for i, ran in zip(prompts, self.engine.run_traces(blocks, plain=plain), strict=False):
                    assert ran.failure is None, ran.failure
                    if self._truth is not None:
                        assert ran.token_ids == self._truth[i].raw.tokens
                        self._note(cells, f"{company}, {scheduling.name}", i, ran.saved)
        return cells

    def _read(self, prompt: int) -> list[int]:
        """Return the places that are read with a prompt: all with the first, every second one with each of the others."""
        return [i for i in range(len(self.places)) if prompt == 0 or i % 2 == prompt % 2]

    def _source(self, prompt: int) -> str:
        places = "\n".join(f"    {i}: lambda: {self.places[i].source}," for i in self._read(prompt))
        return SOURCE.format(places=places, steps=STEPS)

    def _note(self, cells: Cells, condition: str, prompt: int, saved: dict[str, Any]) -> None:
        assert self._truth is not None
        for i in self._read(prompt):
            place = self.places[i]
            row = cells.setdefault(place.row, {})
            for step in range(STEPS):
                name = f"{PHASES[step]}, {condition}"
                found = saved["refused"].get((i, step))
                if found is None:
                    found = _error(place, self._truth[prompt], step, saved["values"][i, step])
                elif place.module:
                    found = found.replace(place.module, "MODULE")
                else:
                    found = re.sub(r"\bblocks\[\d+\]", "blocks[i]", found)
                before = row.setdefault(name, found)
                if isinstance(before, float) and isinstance(found, float):
                    row[name] = max(before, found)
                else:
                    assert before == found, f"{place.source}: {before!r} and {found!r}"


def _error(place: Place, truth: Truth, step: int, value: Any) -> float:
    assert place.truth is not None, f"{place.source} is given, and nothing says what it must be"
    expected = place.truth(truth, step)
    if place.row.endswith(SETS):
        value, expected = value.sort(-1).values.to(expected.dtype), expected.sort(-1).values
    return difference(value, expected)


def measure(folder: Path, columns: list[str], ranks: int, result: Path) -> None:
    """Measure columns of the table one after the other.

    Args:
        folder: where checkpoints are written to.
        columns: their names.
        ranks: the tensor-parallel size; this process is one of them.
        result: where to write what has been measured, after each column.
    """
    measured: dict[str, Cells] = {}
    rank = os.environ["RANK"]
    for number, column in enumerate(columns):
        arch, shape = COLUMNS[column]
        # A rank that is done first must not meet the others where they are leaving.
        os.environ["MASTER_PORT"] = _port(folder / f"{number}-port", rank)
        # Each rank writes its own; the seed makes them the same.
        checkpoint = write_demo_model(folder / f"{number}-{rank}", arch, shape)
        measurement = Measurement(checkpoint, ranks, reports=rank == "0")
        measured[column] = measurement.cells()
        assert measurement.engine.interleaver.idle
        measurement.engine.close()
        if rank == "0":
            result.write_text(json.dumps(measured))


def _port(told: Path, rank: str) -> str:
    """Return a port that is free now; rank 0 finds it and tells the others in a file."""
    if rank == "0":
        with socket.socket() as found:
            found.bind((os.environ["MASTER_ADDR"], 0))
            port = str(found.getsockname()[1])
        told.parent.mkdir(parents=True, exist_ok=True)
        new = told.with_suffix(".new")
        new.write_text(port)
        new.rename(told)
    while not told.exists():  # whoever started the ranks ends them all when one fails
        time.sleep(0.05)
    return told.read_text()


def main() -> None:
    """Measure as one rank; see the module's docstring."""
    result, folder, *columns = sys.argv[1:]
    ranks = int(os.environ["WORLD_SIZE"])
    prepare_environment(ranks)
    Limits.step_seconds = 60.0  # of no interest here: on a busy machine a block may wait for a core
    measure(Path(folder), columns, ranks, Path(result))


if __name__ == "__main__":
    main()
