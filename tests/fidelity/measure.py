"""Measures how far each location is from transformers: in this process, or as one of several tensor-parallel ranks.

As a program, `python -m tests.fidelity.measure RESULT FOLDER COLUMN…`, it is one rank of a model spread over processes
(RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which); rank 0 writes what it measured to RESULT as JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.options import prepare_environment
from interpose.cli.demo_model import ARCHITECTURES, Shape, write_demo_model
from tests.engine.conftest import expression
from tests.engine.harness import Block, LocalEngine
from tests.fidelity.ranks import LaunchedRank
from tests.oracle import Oracle, difference, locations
from tests.oracle.checkpoints import ARCHITECTURES as RAW

# Two layers show both kinds of those that alternate; two key/value heads are spread over two ranks, four over four.
SHAPE = Shape(layers=2, hidden=128, context=256)
# What is measured, by the name of its column: an architecture and its sizes.
COLUMNS = {arch: (arch, SHAPE) for arch in sorted(ARCHITECTURES)}
COLUMNS["llama, 1 k/v head"] = ("llama", replace(SHAPE, kv_heads=1))  # ranks hold copies of the head
STEPS = 2
BLOCK = 32  # of the cache: a prompt longer than this can come from it
LONG = [5 + 7 * i % 480 for i in range(41)]
PROMPTS = [LONG, [3, 77], [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19], [222], *([i, 9 * i, 4] for i in range(20, 24))]
BESIDE = [[(11 * i + 3) % 490 for i in range(150)], LONG]  # one is cut into chunks where prompts are
STEP_TOKENS = 64

RAW_ROWS = {
    "block": "layer",
    "attention": "attention",
    "mlp": "MLP",
    "norm": "norms",
    "column-input": "inputs of merged and column-parallel projections",
    "column": "outputs of merged and column-parallel projections",
    "row-input": "inputs of row-parallel projections",
    "row-output": "outputs of row-parallel projections",
    "heads": "q/k norms",
    "embedding": "embeddings",
    "logits": "logits",
}
# Modules between a column- and a row-parallel projection, whose values transformers has under another name.
INNER = {"attn.attn": "attention kernel's output", "mlp.act_fn": "activation module's output"}
# The same experts in any order.
SETS = ("experts", "expert_weights")


@dataclass(frozen=True)
class Scheduling:
    """How the engine schedules: whether it cuts prompts into chunks, and whether it caches them."""

    chunked: bool
    cached: bool

    @property
    def name(self) -> str:
        return f"{'chunked' if self.chunked else 'whole'}, {'prefix cache' if self.cached else 'no prefix cache'}"


SCHEDULINGS = [Scheduling(chunked, cached) for chunked in (False, True) for cached in (False, True)]
# row → condition → error or refusal
Cells = dict[str, dict[str, float | str]]


@dataclass(frozen=True)
class Place:
    """A location: its row in the table, what a block writes for it, and what the oracle calls it."""

    row: str
    source: str
    path: str
    kind: str
    canonical: bool


def places_of(checkpoint: Path, arch: str) -> list[Place]:
    """Return the locations to measure: canonical ones, and where the oracle has them raw ones, of one layer."""
    found = []
    for at in locations(checkpoint) if arch in RAW else ():
        if ".0." in f"{at.path}.":  # the first of two equal layers
            continue
        inner = [row for end, row in INNER.items() if at.path.endswith(end) and at.kind == "output"]
        row = f"raw: {(inner or [RAW_ROWS[at.sharding]])[0]}"
        found.append(Place(row, f"{expression(at.path)}.{at.kind}", at.path, at.kind, False))
    known = {at.path for at in locations(checkpoint, canonical=True)} - {"logits"}
    names = [name.replace(".1.", ".0.") for name in sorted(known) if ".1." in name]
    absent = {f"blocks.0.{name}" for name in ("resid_mid", "mlp.gate", "mlp.up", "mlp.act")} - set(names)
    for path in sorted({*known, *absent}):
        found.append(Place(re.sub(r"blocks\.\d+", "blocks[i]", path), expression(path), path, "output", True))
    found.append(Place("unembed.output", "model.unembed.output", "logits", "output", True))
    return found


class Measurement:
    """One architecture's engine and truth.

    Args:
        checkpoint: the model.
        arch: its architecture.
        ranks: the tensor-parallel size.
    """

    def __init__(self, checkpoint: Path, arch: str, ranks: int) -> None:
        spread = {"tensor_parallel_size": ranks, "distributed_executor_backend": LaunchedRank} if ranks > 1 else {}
        self.engine = LocalEngine(
            checkpoint,
            dtype="float32",
            block_size=BLOCK,
            enable_prefix_caching=True,
            max_num_batched_tokens=256,
            **spread,
        )
        self.places = places_of(checkpoint, arch)
        oracles = {True: Oracle(checkpoint, canonical=True)} | ({False: Oracle(checkpoint)} if arch in RAW else {})
        self._truth = [{kind: oracle.run(prompt, STEPS) for kind, oracle in oracles.items()} for prompt in PROMPTS]

    def cells(self) -> Cells:
        """Return the largest error of each row under each condition, or the message it was refused with."""
        cells: Cells = {}
        source = self._source()
        for scheduling in SCHEDULINGS:
            self.engine.reschedule(scheduling.chunked, scheduling.cached, STEP_TOKENS if scheduling.chunked else 256)
            if scheduling.cached:
                self.engine.plain(LONG)
            for company, prompts in (("alone", [0]), ("8 concurrent", list(range(len(PROMPTS))))):
                blocks = [[Block(PROMPTS[i], source, {"max_tokens": STEPS, "ignore_eos": True})] for i in prompts]
                plain = tuple(BESIDE) if company != "alone" else ()
                for i, ran in zip(prompts, self.engine.run_traces(blocks, plain=plain), strict=False):
                    assert ran.failure is None, ran.failure
                    assert ran.token_ids == self._truth[i][True].tokens
                    if ran.saved:  # one rank reports
                        self._note(cells, f"{company}, {scheduling.name}", i, ran.saved)
        return cells

    def _source(self) -> str:
        lines = ["values, refused = {}, {}", f"for step in tracer.iter[:{STEPS}]:"]
        for i, place in enumerate(sorted(self.places, key=self._order)):
            lines += ["    try:", f"        values[{i}, step] = {place.source}"]
            lines += ["    except Exception as error:", f"        refused[{i}, step] = str(error)"]
        return "\n".join([*lines, "values.save()", "refused.save()"]) + "\n"

    def _order(self, place: Place) -> int:
        """Return when the model comes to a place; those that it never comes to are asked for first."""
        tree = self.engine.worker.interpose_tree
        path, kind = place.path, place.kind
        if place.canonical and place.path != "logits":
            above, _, name = place.path.rpartition(".")
            view = tree.find(above).views[name]
            path, kind = view.node.path, view.kind
        return tree.order_of(path, kind) if tree.runs(path, kind) else -1

    def _note(self, cells: Cells, condition: str, prompt: int, saved: dict[str, Any]) -> None:
        for i, place in enumerate(sorted(self.places, key=self._order)):
            for step in range(STEPS):
                phase = "decode" if step else "prefill"
                row = cells.setdefault(place.row, {})
                name = f"{phase}, {condition}"
                if (i, step) in saved["refused"]:
                    row[name] = re.sub(r"\d+", "i", saved["refused"][i, step])
                    continue
                truth = self._truth[prompt][place.canonical]
                expected = truth.logits[step] if place.path == "logits" else truth.value(place.path, place.kind, step)
                value = saved["values"][i, step]
                if place.kind == "input" and isinstance(value, tuple):
                    value = value[0]
                if place.row.endswith(SETS):
                    value, expected = value.sort(-1).values.to(expected.dtype), expected.sort(-1).values
                before = row.get(name, 0.0)
                if isinstance(before, float):
                    row[name] = max(before, difference(value, expected))


def measure(folder: Path, columns: list[str], ranks: int, done: Path | None) -> dict[str, Cells]:
    """Measure columns of the table one after the other.

    Args:
        folder: where checkpoints are written to.
        columns: their names.
        ranks: the tensor-parallel size; this process is one of them.
        done: where to write what has been measured, after each column.
    """
    measured = {}
    for number, column in enumerate(columns):
        arch, shape = COLUMNS[column]
        # Each rank writes its own; the seed makes them the same.
        checkpoint = write_demo_model(folder / f"{number}-{os.environ.get('RANK', '0')}", arch, shape)
        measurement = Measurement(checkpoint, arch, ranks)
        measured[column] = measurement.cells()
        assert measurement.engine.interleaver.idle
        measurement.engine.close()
        if done is not None:
            done.write_text(json.dumps(measured))
    return measured


def main() -> None:
    """Measure as one rank; see the module's docstring."""
    result, folder, *columns = sys.argv[1:]
    prepare_environment(int(os.environ["WORLD_SIZE"]))
    measure(Path(folder), columns, int(os.environ["WORLD_SIZE"]), Path(result) if os.environ["RANK"] == "0" else None)


if __name__ == "__main__":
    main()
