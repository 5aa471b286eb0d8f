"""What a block costs the steps it runs in: captures and edits against stock eager steps.

Both are measured in one run. The control is a second stock engine, as in `benchmarks.plain_decode`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rounds import Child, alternate
from interpose.cli.demo_model import Shape, write_demo_model

ROUNDS = 24
TOKENS = 64

# By batch size: the block of the batch's first request, by the case's name. The other requests have no block.
CASES = {
    1: {
        "plain": "",
        "capture one layer, prompt": "capture one layer, prompt",
        "capture all layers, all steps": "capture all layers, all steps",
        "steer one layer, all steps": "steer one layer, all steps",
    },
    8: {
        "plain": "",
        "7 plain beside 1 traced": "capture one layer, all steps",
    },
}


def run() -> dict[str, dict[str, float]]:
    """Return ms/step of each case, and its ratio to stock eager with the same batch."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_demo_model(Path(folder) / "llama", "llama", Shape(layers=8))
        stock, control, ours = (
            Child("benchmarks.engine_child", kind, str(checkpoint)) for kind in ("stock", "stock", "interpose")
        )
        try:
            results: dict[str, dict[str, float]] = {}
            for batch, blocks in CASES.items():
                request: dict[str, Any] = {"batch": batch, "prompt_tokens": 16, "tokens": TOKENS}
                cases = [("stock", stock, request), ("control", control, request)]
                cases += [(name, ours, {**request, "work": block}) for name, block in blocks.items()]
                base, *others = alternate(cases, ROUNDS)
                results[f"batch {batch}, stock"] = {"ms/step": base.median / TOKENS * 1e3}
                for other in others:
                    figures = {"ms/step": other.median / TOKENS * 1e3, **other.over(base).figures()}
                    results[f"batch {batch}, {other.name}"] = figures
            return results
        finally:
            for child in (stock, control, ours):
                child.close()
