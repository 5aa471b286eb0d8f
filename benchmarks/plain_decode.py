"""What the system costs requests without a block: plain decode against stock vLLM.

Both are measured in one run. A second stock engine is measured against the first in the same rounds. The control's ratio would be
1 on a machine that measured perfectly; how far it is from 1 says how much to trust the other ratio. Two processes of the same
engine differ by a percent or two for as long as they live (by their place in memory, by the core they start on), so each kind
has several.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.rounds import Child, Measured, alternate
from interpose.cli.demo_model import Shape, write_demo_model

ENGINES = 4  # engines of each kind, one after another
ROUNDS = 24  # rounds with each engine
TOKENS = 96
BATCHES = (1, 8)
KINDS = {"stock": "stock", "interpose": "interpose", "control": "stock"}


def run() -> dict[str, dict[str, float]]:
    """Return ms/step and ratios of stock, interpose and stock again, for batches of 1 and 8."""
    measured = {(batch, name): Measured(name, []) for batch in BATCHES for name in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_demo_model(Path(folder) / "llama", "llama", Shape(layers=8))
        for _ in range(ENGINES):
            children = {name: Child("benchmarks.engine_child", kind, str(checkpoint)) for name, kind in KINDS.items()}
            try:
                for batch in BATCHES:
                    request = {"batch": batch, "prompt_tokens": 16, "tokens": TOKENS}
                    for one in alternate([(name, child, request) for name, child in children.items()], ROUNDS):
                        measured[batch, one.name].seconds.extend(one.seconds)
            finally:
                for child in children.values():
                    child.close()
    results: dict[str, dict[str, float]] = {}
    for (batch, name), one in measured.items():
        ratio = {} if name == "stock" else one.over(measured[batch, "stock"]).figures()
        results[f"batch {batch}, {name}"] = {"ms/step": one.median / TOKENS * 1e3, **ratio}
    return results
