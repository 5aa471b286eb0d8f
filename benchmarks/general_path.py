"""What a block costs for each request and location, where no graph and no plan runs it.

All requests of a batch have the same block, in one engine. A step of the batch without blocks is subtracted. The rest is divided
by the number of requests, and by the number of locations that each block waits for. What is left is the time of this project's
Python and of its small tensor operations, with those of the block itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rounds import Child, alternate
from interpose.cli.demo_model import Shape, write_demo_model

LAYERS = 8
BATCH = 32
TOKENS = 24
ROUNDS = 12
# The model computes on the engine's thread. Work of other processes does not count then.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

# By case: the block, and the number of locations that it waits for in a step.
CASES = {
    "each step": ("each step", 1),
    "read one layer": ("read one layer, all steps", 1),
    "capture one layer": ("capture one layer, all steps", 1),
    "steer one layer": ("steer one layer, all steps", 1),
    "read all layers": ("read all layers, all steps", LAYERS),
    "capture all layers": ("capture all layers, all steps", LAYERS),
    "steer all layers": ("steer all layers, all steps", LAYERS),
}


def run(*, rounds: int | None = None) -> dict[str, dict[str, float]]:
    """Return ms/step of each case, and what is over a step without blocks.

    That is in microseconds for each request and location.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_demo_model(Path(folder) / "llama", "llama", Shape(layers=LAYERS))
        engine = Child("benchmarks.engine_child", "general", str(checkpoint), environment=ONE_THREAD)
        try:
            request: dict[str, Any] = {
                "batch": BATCH,
                "prompt_tokens": 8,
                "tokens": TOKENS,
                "typical": True,
                "own_thread": True,
            }
            cases = [("plain", engine, request)]
            cases += [(name, engine, {**request, "work": block, "traced": BATCH}) for name, (block, _) in CASES.items()]
            plain, *others = alternate(cases, rounds or ROUNDS)
            results = {f"batch {BATCH}, plain": {"ms/step": plain.median / TOKENS * 1e3}}
            for other in others:
                shares = [
                    (one - base) / TOKENS / BATCH / CASES[other.name][1] * 1e6
                    for one, base in zip(other.seconds, plain.seconds, strict=True)
                ]
                results[f"batch {BATCH}, {other.name}"] = {
                    "ms/step": other.median / TOKENS * 1e3,
                    "us/request and location": sorted(shares)[len(shares) // 2],
                }
            return results
        finally:
            engine.close()
