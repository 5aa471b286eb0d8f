"""What our own code costs a step without a block: one engine, with and without that code.

Two processes of one engine differ by a few per cent for as long as they live, on a GPU's host by more, and so does one minute
from the next. Here both are one process. For a stretch of steps its scheduler, worker and model runner are of vLLM's own
classes, for the next stretch of ours, while the same requests go on. In the control they are vLLM's own in both stretches. The
engine's options are the same in both; `graph_steps` and `plain_decode` compare these.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from benchmarks.models import Model
from benchmarks.rounds import LEAST, Child, Measured

BATCHES = (32, 1)
PROMPT_TOKENS = 64
TOKENS = 128
SECONDS = 120.0  # seconds of a batch size
ROUNDS = 400
KINDS = {"off again": True, "on": False}  # whether a kind is the control


def run(
    *, model: str | None = None, dtype: str | None = None, rounds: int | None = None, seconds: float | None = None
) -> dict[str, dict[str, float]]:
    """Return ms/step without our code and the ratio with it, for batches of 32 and of 1.

    Args:
        model, dtype: see `Model.chosen`.
        rounds: rounds at most.
        seconds: seconds of each batch size; by default two minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = Model.chosen(model, dtype).write(Path(folder))
        options |= {"async_scheduling": None, "skip_tokenizer_init": True, "disable_log_stats": True}
        child = Child("benchmarks.engine_child", "interpose", folder, json.dumps(options))
        try:
            rows: dict[str, dict[str, float]] = {}
            for batch in BATCHES:
                rows |= _measured(child, batch, rounds or ROUNDS, seconds or SECONDS)
            return rows
        finally:
            child.close()


def _measured(child: Child, batch: int, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return the rows of one batch size."""
    took: dict[str, tuple[Measured, Measured]] = {name: (Measured("off", []), Measured(name, [])) for name in KINDS}
    request = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "tokens": TOKENS}
    child.ask(**request, first=False, control=False)
    ends = time.monotonic() + seconds
    for turn in range(max(rounds, LEAST)):
        if turn >= LEAST and time.monotonic() > ends:
            break
        for name, control in KINDS.items():
            for one, value in zip(took[name], child.ask(**request, first=bool(turn % 2), control=control), strict=True):
                one.seconds.append(value)
    off = took["on"][0]
    rows = {f"batch {batch}, off": {"ms/step": off.median * 1e3, "rounds": float(len(off.seconds))}}
    for name, (base, one) in took.items():
        rows[f"batch {batch}, {name}"] = {"ms/step": one.median * 1e3, **one.over(base).figures()}
        print(f"  batch {batch}, {name}: {one.over(base)}", flush=True)
    return rows
