"""What blocks cost over several tensor-parallel ranks, against what they cost on one.

For each number of ranks there are an engine with traces and a stock engine, both on the service's executor, with the same model
and options, without a service around them. Rows of `benchmarks.tier_rows` run with one request and with 32, in alternating rounds
with stock. A row's last line is the ratio to stock over its ratio at one rank, in the same run.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.graph_steps import PROMPT_TOKENS
from benchmarks.models import Model
from benchmarks.rounds import Child, alternate
from benchmarks.tensor_parallel import MEMORY
from benchmarks.tiers import Answering

# All of them have small constants: large constants are uploaded to a session, and there is none.
NAMES = ("plain", "capture one", "capture all", "steer")
BATCHES = (1, 32)
ROUNDS = 12
SECONDS = 240.0  # seconds of all sizes, without the engines' starts
GOAL = 1.10  # the ratio at several ranks over the ratio at one


def run(
    *,
    tensor_parallel_sizes: Sequence[int] | None = None,
    model: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    seconds: float | None = None,
) -> dict[str, dict[str, float]]:
    """Return ms/step of each row by number of ranks, and its ratio to stock and to one rank.

    Args:
        tensor_parallel_sizes: by default 1 and 2, and 4 where there are GPUs for that.
        model, dtype: see `Model.chosen`.
        rounds: rounds of each batch size, at most.
        seconds: seconds of all sizes, without the engines' starts.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    measured_model = Model.chosen(model, dtype)
    sizes = measured_model.layouts(tensor_parallel_sizes)
    tokens = 128 if measured_model.gpu else 8
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        options = measured_model.write(Path(folder))
        options["enable_prefix_caching"] = False
        at_once = measured_model.gpu and 2 * len(sizes) * options["gpu_memory_utilization"] <= MEMORY
        pairs = [_engines(size, folder, options) for size in sizes]
        started = [stack.enter_context(pair) for pair in pairs] if at_once else []
        for index, size in enumerate(sizes):
            with contextlib.ExitStack() as one:
                stock, traced = started[index] if at_once else one.enter_context(pairs[index])
                began = time.monotonic()
                for child in (stock, traced):
                    child.ask(prompt_tokens=PROMPT_TOKENS, tokens=1)
                print(f"  {size} ranks: both engines run after {time.monotonic() - began:.0f} s", flush=True)
                for batch in BATCHES:
                    request = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "tokens": tokens}
                    part = (seconds or SECONDS) / len(sizes) / len(BATCHES)
                    most = rounds or (ROUNDS if measured_model.gpu else 2)
                    for name, figures in _measured(stock, traced, request, most, part):
                        found[f"{measured_model.size}, {size} ranks, batch {batch}, {name}"] = figures
                        print(f"  {size} ranks, batch {batch}, {name}: {figures['ms/step']:.4g} ms/step", flush=True)
    return found | compared(found)


@contextlib.contextmanager
def _engines(ranks: int, checkpoint: str, options: dict[str, Any]) -> Iterator[tuple[Child, Child]]:
    """Start a stock engine and an engine with traces, without waiting for them; end both."""
    children = []
    try:
        for module in ("benchmarks.stock_engine", "benchmarks.tier_ranks_child"):
            argv = (checkpoint, str(ranks), json.dumps(options))
            children.append(Child(module, *argv, environment={"VLLM_PLUGINS": "none"}))
        stock, traced = children
        yield stock, traced
    finally:
        for child in children:
            child.stop()
        for child in children:
            child.close()


def _measured(
    stock: Any, traced: Any, request: dict[str, Any], rounds: int, seconds: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of each row, and of the stock engine and its control."""
    began = time.monotonic()
    cases: list[tuple[str, Any, dict[str, Any]]] = [(name, stock, request) for name in ("stock", "control")]
    for row in NAMES:
        given = {**request, "row": row}
        try:
            for _ in range(2):  # The first run prepares what the others use.
                Answering(traced).ask(**given)
        except RuntimeError as error:
            print(f"  {row} does not count: {error}", flush=True)
            continue
        cases.append((row, Answering(traced), given))
    stock.ask(**request)
    left = max(0.0, seconds - (time.monotonic() - began))
    base, *others = alternate(cases, rounds, False, left)
    for one in (base, *others):
        figures = {"ms/step": one.median / request["tokens"] * 1e3}
        figures |= one.over(base).figures() if one is not base else {}
        yield one.name, {**figures, "rounds": len(one.seconds)}


def compared(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return, for each row at several ranks, its ratio to stock over that at one rank.

    Args:
        found: the figures by "MODEL, N ranks, batch B, ROW".
    """
    rows = {}
    for case, figures in found.items():
        model, ranks, batch, row = case.split(", ")
        one = found.get(f"{model}, 1 ranks, {batch}, {row}", {})
        if ranks != "1 ranks" and "ratio" in figures and one.get("ratio"):
            rows[f"{case}: over one rank"] = {"ratio": figures["ratio"] / one["ratio"], "goal": GOAL}
    return rows
