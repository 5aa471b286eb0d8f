"""Measures how far each location is from transformers: in this process, or as one of several ranks of a model.

As a program, `python -m tests.fidelity.measure RESULT FOLDER LAYOUT COLUMN…`, it is one of the ranks that a model is spread over
(RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR say which); the layout's reporting rank writes what it measured to RESULT as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layouts import Layout
from executor.block.fiber import Fiber  # noqa: F401 - before transformers makes a model, see there
from executor.plugin.config import check_config, prepare_environment
from interpose.cli.demo_model import ARCHITECTURES, write_demo_model, write_model
from tests.engine.harness import Block, Limits, LocalEngine, Ran
from tests.fidelity.architectures import ALL, SHAPE
from tests.fidelity.changes import Changed, changed, truth_of
from tests.fidelity.places import Place, Truth, places_of
from tests.fidelity.ranks import LaunchedRank
from tests.oracle import Oracle, difference
from tests.oracle.experts import SETS, sorted_experts

# What is measured, by the name of its column: an architecture and its sizes.
COLUMNS = {arch: (arch, SHAPE) for arch in sorted(ARCHITECTURES)}
COLUMNS["llama, 1 k/v head"] = ("llama", replace(SHAPE, kv_heads=1))  # ranks hold copies of the head
# As many as query heads, as OLMoE has them: vLLM norms the keys of all heads at once, which takes no copies of them.
COLUMNS["olmoe"] = ("olmoe", replace(SHAPE, kv_heads=SHAPE.heads))
PHASES = ("prefill", "decode")
STEPS = len(PHASES)
BLOCK = 32  # of the cache: a prompt longer than this can come from it
CACHE = 256  # blocks: what runs at the same time takes a fraction of them
LONG = [5 + 7 * i % 480 for i in range(41)]
PROMPTS = [LONG, [3, 77], [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19], [222], *([i, 9 * i, 4] for i in range(20, 24))]
BESIDE = [[(11 * i + 3) % 490 for i in range(150)], LONG]  # one is cut into chunks where prompts are
STEP_TOKENS = 64


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
Off = Callable[[Any, Any], float]
# row → condition → error or refusal
Cells = dict[str, dict[str, float | str]]
START = "start"  # the only row of an engine that does not start: why, under ""
CHANGED = "changed: "  # begins the row of a change


def conditions(schedulings: Sequence[Scheduling] = SCHEDULINGS) -> list[str]:
    """Return the names of the conditions that every location is measured under, with these schedulings or all."""
    return [
        f"{phase}, {company}, {scheduling.name}"
        for phase in PHASES
        for company in COMPANY
        for scheduling in schedulings
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


@dataclass(frozen=True)
class Known:
    """What transformers computes for one column, the same whatever the layout.

    Attributes:
        checkpoint: the model.
        prompts: the truth about each of `PROMPTS`.
        changes: what each change does.
    """

    checkpoint: Path
    prompts: list[Truth]
    changes: dict[str, Changed]

    @classmethod
    def write(cls, folder: Path, column: str) -> None:
        """Make a column's checkpoint and compute what is known of it, unless the folder has them."""
        if cls._file(folder, column).exists():
            return
        path = folder / as_file(column)
        if column in ALL:
            checkpoint = write_model(path, ALL[column](), SHAPE)
        else:
            arch, shape = COLUMNS[column]
            checkpoint = write_demo_model(path, arch, shape)
        oracle = Oracle(checkpoint)
        prompts = [Truth.of(oracle, prompt, STEPS) for prompt in PROMPTS]
        new = cls._file(folder, column).with_suffix(".new")
        torch.save(cls(checkpoint, prompts, truth_of(oracle, checkpoint, STEPS)), new)
        new.rename(cls._file(folder, column))

    @classmethod
    def read(cls, folder: Path, column: str) -> Known:
        """Return what is known of a column, when it is."""
        file = cls._file(folder, column)
        _wait(file.exists)
        known: Known = torch.load(file, weights_only=False)  # of this program's own making
        return known

    @staticmethod
    def _file(folder: Path, column: str) -> Path:
        return folder / f"{as_file(column)}.known"


class NotStarted(Exception):
    """An engine is refused as it starts."""


class Measurement:
    """One architecture's engine and truth.

    Args:
        known: the model and the truth.
        layout: of the engine.
        reports: whether this process is told the values; one rank is.
        dtype: of the engine.
        modules: whether the engine's modules are measured, beside canonical values.
        rows: the names with which the measured rows end; all rows without a name.
        off: how far off a value is, given it and the truth.

    Raises:
        NotStarted: there is no such engine, with the reason.
    """

    def __init__(
        self,
        known: Known,
        layout: Layout,
        reports: bool,
        dtype: str = "float32",
        modules: bool = True,
        rows: Sequence[str] = (),
        off: Off = difference,
    ) -> None:
        config = json.loads((known.checkpoint / "config.json").read_text())
        special: dict[str, object] = {"language_model_only": True} if "text_config" in config else {}
        if "linear_attention" in config.get("text_config", config).get("layer_types", ()) and torch.cuda.is_available():
            special["gdn_prefill_backend"] = "triton"  # vLLM would take FlashInfer's kernel, installed or not
        self._off = off
        self._checkpoint = known.checkpoint
        self._made = partial(
            LocalEngine,
            known.checkpoint,
            **special,
            dtype=dtype,
            block_size=BLOCK,
            max_num_batched_tokens=256,
            num_gpu_blocks_override=CACHE,
            **spread(layout),
        )
        try:
            self.engine = self._made(enable_prefix_caching=True)
            check_config(self.engine.llm.llm_engine.vllm_config)
        except ValueError as why:
            raise NotStarted(str(why)) from why
        # What vLLM has switched off stays off: it cuts and caches no prompt of latent attention on CPUs.
        made = self.engine.llm.llm_engine.vllm_config
        latent = made.model_config.use_mla
        self._cuts = made.scheduler_config.enable_chunked_prefill or not latent
        self._caches = made.cache_config.enable_prefix_caching or not latent
        # The states that such a model's cache holds are laid out otherwise in an engine without a prefix cache.
        self._aligned = made.cache_config.mamba_cache_mode == "align"
        places = places_of(known.checkpoint, self.engine.worker.interpose_tree, modules)
        self.places = [place for place in places if not rows or place.row.endswith(tuple(f".{row}" for row in rows))]
        self._truth = known.prompts if reports else None
        self._changes = known.changes if reports else None

    def cells(self, schedulings: Sequence[Scheduling] = SCHEDULINGS, only: frozenset[str] = frozenset()) -> Cells:
        """Return the largest error of each row under each condition, or the message it was refused with.

        Args:
            schedulings: those to measure under.
            only: the rows to measure; empty for all.
        """
        all_of_them = self.places
        self.places = [place for place in all_of_them if not only or CHANGED + place.row in only]
        changes = changed(self.engine, self.places, self._changes, PHASES, self._off)
        cells: Cells = {CHANGED + row: phases for row, phases in changes.items()}
        self.places = [place for place in all_of_them if not only or place.row in only]
        for condition, prompt, ran in self._ran(schedulings):
            if self._truth is not None:
                assert ran.token_ids == self._truth[prompt].raw.tokens
                self._note(cells, condition, prompt, ran.saved)
        return cells

    def _ran(self, schedulings: Sequence[Scheduling]) -> Iterator[tuple[str, int, Ran]]:
        """Yield what each trace gave, with its conditions but for the phase, and the number of its prompt."""
        sampling = {"max_tokens": STEPS, "ignore_eos": True}
        if self._aligned:
            schedulings = sorted(schedulings, key=lambda one: not one.cached)
        for scheduling in schedulings:
            chunked, cached = scheduling.chunked and self._cuts, scheduling.cached and self._caches
            if self._aligned and not cached:
                self._start_without_cache()
            self.engine.reschedule(chunked, cached, STEP_TOKENS if chunked else 256)
            if cached:
                self.engine.plain(LONG)
            for company, prompts in COMPANY.items():
                blocks = [[Block(PROMPTS[i], self._source(i), sampling)] for i in prompts]
                plain = tuple(BESIDE) if company != "alone" else ()
                for i, ran in zip(prompts, self.engine.run_traces(blocks, plain=plain), strict=False):
                    assert ran.failure is None, ran.failure
                    yield f"{company}, {scheduling.name}", i, ran

    def _start_without_cache(self) -> None:
        """Put an engine without a prefix cache in the place of one with it."""
        self.engine.close()
        if "RANK" in os.environ:
            meet(self._checkpoint.parent, f"again-{os.environ['MASTER_PORT']}", int(os.environ["RANK"]))
        self.engine = self._made(enable_prefix_caching=False)
        self._aligned = False

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
                    found = _error(place, self._truth[prompt], step, saved["values"][i, step], self._off)
                else:
                    found = place.generally(found)
                before = row.setdefault(name, found)
                if isinstance(before, float) and isinstance(found, float):
                    row[name] = max(before, found)
                else:
                    assert before == found, f"{place.source}: {before!r} and {found!r}"


def _error(place: Place, truth: Truth, step: int, value: Any, off: Off) -> float:
    expected = place.expected(truth, step)
    if place.row.endswith(SETS):
        value, expected = sorted_experts(value).to(expected.dtype), sorted_experts(expected)
    return off(value, expected)


def as_file(name: str) -> str:
    """Return the name of a column or a layout as part of a file's name."""
    return re.sub(r"\W+", "-", name)


def spread(layout: Layout) -> dict[str, Any]:
    """Return an engine's options for a layout whose ranks are launched processes."""
    if layout.ranks == 1:
        return {}
    return {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "distributed_executor_backend": LaunchedRank,
    }


def measure(
    folder: Path, columns: dict[str, Sequence[Scheduling]], layout: Layout, result: Path, rows: Sequence[str] = ()
) -> None:
    """Measure columns of the table one after the other.

    Args:
        folder: has checkpoints and what is known of them; what is missing is made.
        columns: their names, and the schedulings to measure each under.
        layout: this process is one of its ranks.
        result: where to write what has been measured, after each column.
        rows: as of `Measurement`.
    """
    prepare_rank(layout)
    measured: dict[str, Cells] = {}
    rank = int(os.environ["RANK"])
    for column, schedulings in columns.items():
        gc.freeze()  # vLLM collects garbage when it loads and when it ends, and need not look at what has been imported
        meet(folder, f"{result.stem}-{as_file(column)}", rank)
        if rank == 0:
            Known.write(folder, column)
        measurement = partial(Measurement, modules=column not in ALL, rows=rows)
        known, reports = Known.read(folder, column), rank == layout.reporting
        measured[column] = cells_of(known, layout, schedulings, reports, measurement)
        if rank == layout.reporting:
            write_result(result, measured)


def prepare_rank(layout: Layout) -> None:
    """Make this process ready to be one of a layout's ranks."""
    Limits.step_seconds = 300.0  # of no interest here: on a busy machine a block may wait for a core
    prepare_environment(layout.ranks)
    # The stages tell each other of requests, which have random names in each engine otherwise.
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"


def write_result(result: Path, measured: Any) -> None:
    """Write what was measured, as a whole: the process may be ended at any time."""
    new = result.with_suffix(".new")
    new.write_text(json.dumps(measured))
    new.rename(result)


def cells_of(
    known: Known,
    layout: Layout,
    schedulings: Sequence[Scheduling],
    reports: bool,
    made: Callable[[Known, Layout, bool], Measurement] = Measurement,
    only: frozenset[str] = frozenset(),
) -> Cells:
    """Return what one architecture's engine gives and refuses, or why there is none.

    Args:
        only: as of `Measurement.cells`.
    """
    try:
        measurement = made(known, layout, reports)
    except NotStarted as refused:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()  # the groups of a dense model would stay, which lack the group of a mixture's experts
        return {START: {"": str(refused)}}
    cells = measurement.cells(schedulings, only) if only else measurement.cells(schedulings)
    assert measurement.engine.interleaver.idle
    measurement.engine.close()
    return cells


def meet(folder: Path, name: str, rank: int) -> None:
    """Have the ranks meet at a port of their own: one that is done first must not find the others where they are leaving."""
    os.environ["MASTER_PORT"] = _port(folder / f"{name}.port", rank)


def _port(told: Path, rank: int) -> str:
    """Return a port that is free now; rank 0 finds it and tells the others in a file."""
    if rank == 0:
        with socket.socket() as found:
            found.bind((os.environ["MASTER_ADDR"], 0))
            port = str(found.getsockname()[1])
        told.parent.mkdir(parents=True, exist_ok=True)
        new = told.with_suffix(".new")
        new.write_text(port)
        new.rename(told)
    _wait(told.exists)
    return told.read_text()


def _wait(there: Callable[[], bool]) -> None:
    while not there():  # the process that started the ranks ends them all when a rank fails
        time.sleep(0.02)


def main() -> None:
    """Measure as one rank; see the module's docstring."""
    result, folder, layout, *columns = sys.argv[1:]
    measure(Path(folder), dict.fromkeys(columns, SCHEDULINGS), Layout.named(layout), Path(result))


if __name__ == "__main__":
    main()
