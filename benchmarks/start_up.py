"""The time that workers take to start: the lazy executor against vLLM's own Ray executor.

Both are measured in one run. "actors" is the time until every actor's constructor has returned. vLLM's actors import vLLM and
torch before that. The lazy actors are up at once, can say how far they are, and import afterwards. "workers" is the time until
all workers have loaded the model and wait for steps. vLLM's executor refuses CPUs; the refusal is undone for this benchmark
(`benchmarks.start_executors`).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models import Model
from benchmarks.rounds import LEAST, Asked, Child, Measured, orders

ROUNDS = 5
SECONDS = 400.0  # seconds of a size
STARTS = {"stock": "stock", "stock again": "stock", "lazy": "lazy"}
STAGES = ("actors", "workers")


def run(
    *,
    tensor_parallel_sizes: Sequence[int] | None = None,
    model: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    seconds: float | None = None,
) -> dict[str, dict[str, float]]:
    """Return the seconds of each stage by tensor-parallel size, and ratios to vLLM's executor.

    Args:
        tensor_parallel_sizes: by default 1 and 2, and 4 where there are GPUs for that.
        model, dtype: see `Model.chosen`.
        rounds: counted rounds at most, with one start of each kind.
        seconds: seconds of each size; a round that would end later is left out, except the first two.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    measured_model = Model.chosen(model, dtype)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = json.dumps(measured_model.write(Path(folder)))
        for size in measured_model.layouts(tensor_parallel_sizes):
            child = Child("benchmarks.start_child", folder, str(size), options)
            try:
                child.ask(executor="stock")  # warms up: imported files are in the machine's memory afterwards
                measured = _starts(child, size, rounds or ROUNDS, seconds or SECONDS)
            finally:
                child.close()
            for (stage, name), one in measured.items():
                base = measured[stage, "stock"]
                ratio = {} if one is base else one.over(base).figures()
                results[f"TP {size}, {stage}, {name}"] = {"s": one.median, **ratio, "rounds": len(one.seconds)}
    return results


def _starts(child: Asked, size: int, rounds: int, seconds: float) -> dict[tuple[str, str], Measured]:
    """Return the seconds of each stage and kind of start."""
    ends = time.monotonic() + seconds
    longest = 0.0
    measured = {(stage, name): Measured(name, []) for stage in STAGES for name in STARTS}
    names = list(STARTS)
    for turn, order in enumerate(orders(len(names), rounds)):
        began = time.monotonic()
        if turn >= LEAST and began + longest > ends:
            break
        for name in (names[index] for index in order):
            taken = child.ask(executor=STARTS[name])
            print(f"  TP {size}, {name}: " + ", ".join(f"{stage} {taken[stage]:.2f} s" for stage in STAGES), flush=True)
            for stage in STAGES:
                measured[stage, name].seconds.append(taken[stage])
        longest = max(longest, time.monotonic() - began)
    return measured
