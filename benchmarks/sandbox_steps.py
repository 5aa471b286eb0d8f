"""What a sandboxed process costs a whole engine, against a greenlet in its worker.

One engine with traces runs the same batches with trusted blocks and with sandboxed ones, in alternating rounds. Its options are
those of `benchmarks.tiers`. The first rows have loops that can be plans: of a sandboxed block the worker runs a plan that it has
checked. No plan can hold the blocks of the other rows, but for that of "first token", so that both ways run the block itself.
"more per access" is the time that a sandboxed access takes beyond a greenlet's. "begin" is what a request of one
token takes more. In "31 beside one that decides" one request of 32 has a block; the time
ends with the last of the others.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.graph_steps import PROMPT_TOKENS
from benchmarks.models import Model
from benchmarks.rounds import Measured, alternate
from benchmarks.tiers import Answering, engine_options, engines

ROUNDS = 24
SECONDS = 60.0  # seconds of the rounds of one row, at most
# Row, batch, new tokens of each request, and accesses of a block in a step; 0 for those of all layers.
CASES = (
    ("capture one", 1, 64, 1),
    ("steer", 1, 64, 1),
    ("capture all", 1, 64, 0),
    ("unplannable one", 1, 64, 1),
    ("python one", 1, 64, 1),
    ("unplannable all", 1, 16, 0),
    ("first token", 1, 1, 1),
)
BESIDE: dict[str, Any] = {"row": "unplannable one", "batch": 32, "tokens": 64, "traced": 1}


def run(
    *, model: str | None = None, dtype: str | None = None, rounds: int | None = None, seconds: float | None = None
) -> dict[str, dict[str, float]]:
    """Return the ms of each row with greenlets and in sandboxed processes.

    Args:
        model, dtype: see `Model.chosen`.
        rounds: rounds of each row, at most.
        seconds: seconds of the rounds of one row, at most.
    """
    measured_model = Model.chosen(model, dtype)
    began = time.monotonic()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            **engine_options(measured_model, Path(folder)),
            "sandbox": True,
            "sandbox_plans": True,
        }
        with engines(["interpose"], folder, options) as children:
            asked = children["interpose"]
            layers = asked.ask(row="plain", batch=1, prompt_tokens=PROMPT_TOKENS, tokens=1, report="layers")
            print(f"  the engine runs after {time.monotonic() - began:.0f} s", flush=True)
            most = rounds or (ROUNDS if measured_model.gpu else 4)
            for row, batch, tokens, accesses in CASES:
                request = {"row": row, "batch": batch, "tokens": tokens}
                here, there = _measured(asked, request, most, seconds or SECONDS)
                found = _row(here, there)
                more = (there.median - here.median) * 1e3
                found |= {"more per access": more / tokens / (accesses or layers)} if tokens > 1 else {"begin": more}
                figures[f"{measured_model.size}, {row}"] = _shown(row, found)
            if measured_model.gpu:
                name, beside = "31 beside one that decides", _measured(asked, BESIDE, most, seconds or SECONDS)
                figures[f"{measured_model.size}, {name}"] = _shown(name, _row(*beside))
    return figures


def _row(here: Measured, there: Measured) -> dict[str, float]:
    return {"greenlet": here.median * 1e3, "sandbox": there.median * 1e3, **there.over(here).figures()}


def _shown(name: str, figures: dict[str, float]) -> dict[str, float]:
    """Print a row's figures as they come, and return them."""
    print(f"  {name}: {', '.join(f'{key} {value:.3g}' for key, value in figures.items())}", flush=True)
    return figures


def _measured(asked: Any, request: dict[str, Any], rounds: int, seconds: float) -> list[Measured]:
    """Return the seconds of a batch with greenlets and in sandboxed processes."""
    cases = [
        (name, Answering(asked), {**request, "prompt_tokens": PROMPT_TOKENS, "trusted": name == "greenlet"})
        for name in ("greenlet", "sandbox")
    ]
    for name, one, given in (*cases, *cases):  # the first runs prepare what the others use
        print(f"  {request['row']}, {name}: {one.ask(**given) * 1e3:.4g} ms", flush=True)
    return alternate(cases, rounds, False, seconds)
