"""What a step costs, by the number of requests with a block and of locations in the block.

All requests of a batch have a block of their own trace, which captures or steers the first layers of the model in every step:
one layer, 16, or all. The time is that of the typical step: the mean of the half of a batch's steps between the quartiles. Stock
vLLM runs the same batch without blocks in the same rounds. `python -m benchmarks.tier_plot RESULTS PAGE` draws the result.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.graph_steps import MEMORY, PROMPT_TOKENS
from benchmarks.models import Model
from benchmarks.rounds import Asked, Measured, alternate
from benchmarks.tiers import engine_options, engines

REQUESTS = (1, 8, 32, 64, 256)
FEW_REQUESTS = (1, 8)  # on a CPU
LOCATIONS = (1, 16)  # and all
KINDS = ("capture", "steer")
TOKENS, FEW_TOKENS = 32, 8
SECONDS = 240.0  # seconds of all points, without the engines' starts
ROUNDS = 8


class TypicalStep:
    """An engine that answers with the seconds of a batch's typical step.

    Args:
        asked: an engine of `benchmarks.tier_child`.

    Attributes:
        batches: milliseconds of each batch, from its first request to its last value, divided by its steps.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.batches: list[float] = []

    def ask(self, **request: Any) -> float:
        """Run a batch.

        Raises:
            RuntimeError: the batch does not count, with the reason.
        """
        answer = self._asked.ask(**request, report="parts")
        if isinstance(answer, str):
            raise RuntimeError(answer)
        self.batches.append(answer["all"] / request["tokens"])
        return float(answer["typical step"]) / 1e3


def run(
    *,
    model: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    seconds: float | None = None,
) -> dict[str, dict[str, float]]:
    """Return the time of a typical step, and its ratio to stock vLLM, for each point.

    Args:
        model, dtype: see `Model.chosen`.
        rounds: rounds of each number of requests, at most.
        seconds: seconds of all points, without the engines' starts.
    """
    measured_model = Model.chosen(model, dtype)
    counts = REQUESTS if measured_model.gpu else FEW_REQUESTS
    tokens = TOKENS if measured_model.gpu else FEW_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(measured_model, Path(folder))
        kinds = ("stock", "control", "interpose")
        options["gpu_memory_utilization"] = min(options["gpu_memory_utilization"], MEMORY / len(kinds))
        options["max_num_seqs"] = max(REQUESTS)
        with engines(kinds, folder, options) as children:
            began = time.monotonic()
            layers = children["interpose"].ask(
                row="plain", batch=1, prompt_tokens=PROMPT_TOKENS, tokens=1, report="layers"
            )
            for kind in ("stock", "control"):
                children[kind].ask(row="plain", batch=1, prompt_tokens=PROMPT_TOKENS, tokens=1)
            print(f"  {len(children)} engines run after {time.monotonic() - began:.0f} s", flush=True)
            rows: dict[str, dict[str, float]] = {}
            began = time.monotonic()
            # A step of few requests takes about as long as one of many; the slowest blocks grow with the requests.
            left = float(sum(counts)) + len(counts) * counts[-1] / 4
            for count in counts:
                share = count + counts[-1] / 4
                part = max(0.0, began + (seconds or SECONDS) - time.monotonic()) * share / left
                left -= share
                found = _measured(
                    children, count, locations(layers), tokens, rounds or (ROUNDS if measured_model.gpu else 2), part
                )
                for name, figures in found:
                    rows[f"{measured_model.size}, {name}"] = figures
                    print(f"  {measured_model.size}, {name}: {figures['ms/step']:.4g} ms", flush=True)
            return rows


def locations(layers: int) -> list[int]:
    """Return the numbers of locations that are measured, each once.

    Args:
        layers: layers of the model.
    """
    return sorted({min(count, layers) for count in (*LOCATIONS, layers)})


def _measured(
    children: dict[str, Any], requests: int, layers: Sequence[int], tokens: int, rounds: int, seconds: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the points of one number of requests: a name, and the figures."""
    began = time.monotonic()
    request = {"batch": requests, "prompt_tokens": PROMPT_TOKENS, "tokens": tokens}
    asked = {"stock": (TypicalStep(children["stock"]), {**request, "row": "plain"})}
    asked["control"] = TypicalStep(children["control"]), {**request, "row": "plain"}
    for kind in KINDS:
        for count in layers:
            asked[f"{kind} {count}"] = (
                TypicalStep(children["interpose"]),
                {**request, "row": kind, "locations": count},
            )
    for name, (engine, given) in list(asked.items()):
        try:
            for _ in range(1 if name in ("stock", "control") else 2):
                engine.ask(**given)
        except RuntimeError as error:
            if name in ("stock", "control"):
                raise
            print(f"  {requests} requests, {name} does not count: {error}", flush=True)
            del asked[name]
        engine.batches.clear()
    cases = [(name, engine, given) for name, (engine, given) in asked.items()]
    taken = {one.name: one for one in alternate(cases, rounds, False, max(0.0, seconds - (time.monotonic() - began)))}
    for name, one in taken.items():
        ends = Measured(name, asked[name][0].batches).median
        figures = {"ms/step": one.median * 1e3, "ms/step of the batch": ends}
        if name != "stock":
            figures |= one.over(taken["stock"]).figures()
        yield f"{requests} requests, {name}", {**figures, "rounds": len(one.seconds)}
