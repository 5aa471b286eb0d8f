"""Runs every location, and every change, through one tier after the other, and compares bit for bit.

`python -m tests.fidelity.tiers [COLUMN…]` does so on the GPU that there is, in bfloat16 and with captured graphs, or on the CPU
in float32. The first tier runs the blocks themselves. It is the one that `tests.fidelity.measure` compares with transformers;
here its values are compared with transformers' too, in float32. It ends with status 1 if a value of another tier differs by a
bit, or if a tier had nothing to do.

A tier is forced in that better ones are taken out of the engine. A block that a tier does not take runs in a lesser one, and is
counted there. What was found is recorded beside this file, and `docs/tiers.md` has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import torch

from benchmarks.pages import between
from executor.core.ended import Ended
from executor.graphs.operations import Refused
from executor.plugin.config import prepare_environment
from tests.conftest import ENVIRONMENT
from tests.engine.block.test_accounting import account
from tests.engine.harness import Block, LocalEngine, Ran
from tests.fidelity.changes import changeable
from tests.fidelity.measure import COLUMNS, Known
from tests.fidelity.places import Place, Truth, places_of
from tests.oracle import difference

STEPS = 4
SEQUENCES = 8  # requests in a step
PROMPTS = [[12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19], [3, 77], [222]]
BESIDE = [[5, 9, 301, 77], [3]]
TOLERANCE = 1e-4
READ = """\
kept = []
for step in tracer.iter[:]:
    kept.append({at})
kept.save()
"""
CHANGE = """\
kept = []
for step in tracer.iter[:]:
    value = {at}
    value *= 0.5
    value += 0.25
    kept.append(model.final_norm.output)
kept.save()
"""
RECORDED = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"
MARK = "<!-- table: python -m tests.fidelity.tiers -->"
# Where an account counts the steps of a forced tier.
COUNTED = {"block": "block", "plan": "plan", "program": "graph", "taps": "graph"}


class _Nothing:
    """Takes no loop, in the place of what would."""

    def lower(self, *_: Any) -> Never:
        raise Refused("another tier is forced")


@contextmanager
def forced(engine: LocalEngine, tier: str) -> Iterator[None]:
    """Return a context in which an engine's blocks run in one tier, or in lesser ones.

    Args:
        engine: has plans and tables.
        tier: "block", "plan", "program" or "taps".
    """
    requests = engine.interleaver._requests
    plans, loops = requests._plans, requests._plans.loops
    joining = loops._joining
    lowerer, programs = joining._lowerer, joining._programs
    if tier == "block":
        requests._plans = None
    elif tier == "plan":
        plans.loops = None
    elif tier == "program":
        joining._lowerer = _Nothing()
    else:
        joining._programs = None
    try:
        yield
    finally:
        requests._plans, plans.loops = plans, loops
        joining._lowerer, joining._programs = lowerer, programs


@dataclass
class Found:
    """What a tier gave.

    Attributes:
        took: how many blocks had steps in it.
        equal: how many of these gave what the blocks themselves give, bit for bit.
        differ: the rows of others.
        reasons: why blocks were not taken, and how often.
        off: the largest distance of a read value from transformers'; of the blocks themselves.
    """

    took: int = 0
    equal: int = 0
    differ: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    off: float = 0.0


def blocks_of(places: Sequence[Place]) -> list[tuple[str, str]]:
    """Return the name and the text of a block for each location and for each change."""
    reads = [(place.row, READ.format(at=place.source)) for place in places if place.truth is not None]
    changes = [(f"changed: {place.row}", CHANGE.format(at=place.source)) for place in changeable(list(places))]
    return reads + changes


def run_tiers(engine: LocalEngine, places: Sequence[Place], truths: Sequence[Truth] | None = None) -> dict[str, Found]:
    """Return what each tier gave.

    Args:
        engine: has plans and tables.
        places: the model's.
        truths: what transformers computes for `PROMPTS`; None: its values are not compared with the engine's.

    Raises:
        AssertionError: the blocks themselves are off, or a plain request beside them has other tokens than alone.
    """
    named = blocks_of(places)
    sampling = {"max_tokens": STEPS, "ignore_eos": True}
    traces = [[Block(PROMPTS[i % len(PROMPTS)], text, sampling)] for i, (_, text) in enumerate(named)]
    rans, found = {}, {tier: Found() for tier in COUNTED}
    for tier in COUNTED:
        with forced(engine, tier):
            rans[tier] = engine.run_traces(traces, plain=tuple(BESIDE), plain_tokens=STEPS)
    for tier, seen in found.items():
        assert [one.token_ids for one in rans[tier][len(named) :]] == [
            one.token_ids for one in rans["block"][len(named) :]
        ], f"plain requests beside {tier} have other tokens"
        for (row, _), first, ran in zip(named, rans["block"], rans[tier], strict=False):
            told = account(ran)
            if not told.tiers.get(COUNTED[tier]):
                seen.reasons.update(told.reasons.keys() if ran.failure is None else [ran.failure.message])
                continue
            seen.took += 1
            if alike(first, ran):
                seen.equal += 1
            else:
                seen.differ.append(row)
    if truths is not None:
        reads = [place for place in places if place.truth is not None]
        for i, (place, ran) in enumerate(zip(reads, rans["block"], strict=False)):
            if ran.failure is None:
                truth = truths[i % len(PROMPTS)]
                for step, value in enumerate(ran.saved["kept"]):
                    error = difference(value, place.expected(truth, step))
                    assert error <= TOLERANCE, f"{place.source} in step {step} is off by {error}"
                    found["block"].off = max(found["block"].off, error)
    return found


def alike(one: Ran, other: Ran) -> bool:
    """Whether two runs of a block gave the same, bit for bit; failures are the same if their messages are."""
    if one.failure is not None or other.failure is not None:
        return (one.failure and one.failure.message) == (other.failure and other.failure.message)
    done = one.state is Ended.DONE and other.state is Ended.DONE
    return done and one.token_ids == other.token_ids and _same(one.saved, other.saved)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = (one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) if one.dim() else (one, other)
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def measure(column: str, folder: Path, dtype: str, **options: Any) -> dict[str, Found]:
    """Run a column's locations through all tiers.

    Args:
        column: of `COLUMNS`.
        folder: for the checkpoint.
        dtype: of the engine. In float32 the values are compared with transformers' too.
        options: further ones of the engine.
    """
    from tests.oracle import Oracle

    Known.write(folder, column)
    known = Known.read(folder, column)
    truths = None
    if dtype == "float32":
        oracle = Oracle(known.checkpoint)
        truths = [Truth.of(oracle, prompt, STEPS) for prompt in PROMPTS]
    engine = LocalEngine(known.checkpoint, graphs=True, dtype=dtype, max_num_seqs=SEQUENCES, **options)
    try:
        found = run_tiers(engine, places_of(known.checkpoint, engine.worker.interpose_tree), truths)
        assert engine.interleaver.idle, "a trace left something behind"
    finally:
        engine.close()
    return found


def table(recorded: dict[str, Any]) -> str:
    """Return the table of what was recorded, by device.

    A cell has the number of blocks that the tier took, and the number of these that differ.
    """
    lines = []
    for where, columns in recorded.items():
        lines += [
            f"{where}:",
            "",
            "| architecture | " + " | ".join(COUNTED) + " |",
            "| --- |" + " --- |" * len(COUNTED),
        ]
        for column, tiers in columns.items():
            cells = [
                f"{one['took']}" + (f", {len(one['differ'])} differ" if one["differ"] else "") for one in tiers.values()
            ]
            lines.append(f"| {column} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def record(where: str, found: dict[str, dict[str, Found]]) -> None:
    """Record what was found on a device, and write the page's table.

    Args:
        where: the device and the dtype.
        found: by column and tier.
    """
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    columns = recorded.setdefault(where, {})
    for column, tiers in found.items():
        columns[column] = {tier: {"took": one.took, "differ": one.differ} for tier, one in tiers.items()}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    PAGE.write_text(between(PAGE.read_text(), MARK, table(recorded)))


def main() -> int:
    """Run all columns or those that are named; return the exit status."""
    parser = argparse.ArgumentParser("tests.fidelity.tiers", description="Compare the tiers bit for bit.")
    parser.add_argument("columns", nargs="*", metavar="COLUMN", help="; ".join(COLUMNS))
    asked = parser.parse_args().columns or list(COLUMNS)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    prepare_environment(1)
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"enforce_eager": False} if on_gpu else {}
    dtype = "bfloat16" if on_gpu else "float32"
    device = f"one {torch.cuda.get_device_name()}, captured graphs" if on_gpu else "CPU, at hooks"
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for column in asked:
            found = measure(column, Path(folder), dtype, **options)
            record(f"{device}, {dtype}", {column: found})
            for tier, seen in found.items():
                print(f"{column}, {tier}: {seen.equal} of {seen.took} equal, off {seen.off:.1e}", flush=True)
                print("   ", dict(seen.reasons.most_common(4)), flush=True)
                for row in seen.differ:
                    print(f"    differs: {row}", flush=True)
                wrong += len(seen.differ) + (not seen.took)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
