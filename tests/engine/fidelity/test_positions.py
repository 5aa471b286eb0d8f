"""Models with several positions for each token against transformers: Qwen3.5, and Qwen3-VL for text."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests import stand_ins

NAMES = ("qwen3_5", "qwen3_vl")
# Of the models' attention; what refuses a value names it in the row.
GIVEN = ("attn.q", "attn.rot_q", "attn.rot_k", "attn.pattern", "attn.z", "resid_mid", "resid_post", "mlp.act")
START = """
from vllm.engine.arg_utils import EngineArgs
from executor.plugin.config import check_config
for text in (True, False):
    check_config(EngineArgs(model={path!r}, language_model_only=text, max_model_len=256).create_engine_config())
    print("accepted", text)
"""


def test_values_and_changes_are_those_of_transformers() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.fidelity", "--try", *NAMES], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stdout + made.stderr[-4000:]
    for name, following in pairwise([*NAMES, None]):
        lines = made.stdout.partition(f"{name}, TP 1\n")[2].partition(f"{following}, TP 1\n")[0].splitlines()
        rows = dict(line.strip().split(": ", 1) for line in lines if line.startswith("  blocks"))
        for value in GIVEN:
            assert float(rows[f"blocks[i].{value}"]) <= 1e-4, (name, value)


def test_a_model_that_takes_images_is_refused_at_start_unless_it_is_served_for_text(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {"model_type": "qwen3_vl", "depth": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    stand_ins.use()
    made = subprocess.run(
        [sys.executable, "-c", START.format(path=str(tmp_path))], capture_output=True, text=True, timeout=300
    )
    assert "accepted True" in made.stdout, made.stderr[-4000:]
    assert "accepted False" not in made.stdout
    assert "serve the model for text, with --language-model-only" in made.stderr
