"""What the system costs requests without a block: decode of a plain batch against stock vLLM, in one run.

A second stock engine is measured against the first in the same rounds. Its ratio, the control's, would be 1 on a machine
that measured perfectly; how far it is from 1 says how much to trust the other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.rounds import Child, alternate
from interpose.cli.demo_model import Shape, write_demo_model

ROUNDS = 24
TOKENS = 96


def run() -> dict[str, dict[str, float]]:
    """Return ms/step of stock, interpose and stock again, and the ratios to the first, for batches of 1 and 8."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_demo_model(Path(folder) / "llama", "llama", Shape(layers=8))
        kinds = {"stock": "stock", "interpose": "interpose", "control": "stock"}
        children = {name: Child("benchmarks.engine_child", kind, str(checkpoint)) for name, kind in kinds.items()}
        try:
            results: dict[str, dict[str, float]] = {}
            for batch in (1, 8):
                request = {"batch": batch, "prompt_tokens": 16, "tokens": TOKENS}
                stock, *others = alternate([(name, child, request) for name, child in children.items()], ROUNDS)
                results[f"batch {batch}, stock"] = {"ms/step": stock.median / TOKENS * 1e3}
                for other in others:
                    figures = {"ms/step": other.median / TOKENS * 1e3, **other.over(stock).figures()}
                    results[f"batch {batch}, {other.name}"] = figures
            return results
        finally:
            for child in children.values():
                child.close()
