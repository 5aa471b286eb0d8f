"""What blocks cost over several ranks, against what they cost on one.

For each layout there are an engine with traces and a stock engine, both on the service's executor, with the same model and
options, without a service around them. A layout is a number of tensor-parallel ranks, or such ranks in several pipeline stages
(`--layout 2x2`). Rows of `benchmarks.tier_rows` run with one request and with 32, in alternating rounds with stock. A row's last
line is the ratio to stock over its ratio at one rank, in the same run.

With `--service` the rows run through a whole service of each layout too: gRPC, Ray Serve, a session. The ratio of these rows is
to stock as well, and "to engine" is the ratio to the engine in the same rounds.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_child import switched_on
from benchmarks.graph_steps import PROMPT_TOKENS
from benchmarks.layouts import Layout
from benchmarks.models import Model
from benchmarks.rounds import Asked, Child, Measured, alternate
from benchmarks.served import Service
from benchmarks.tensor_parallel import MEMORY
from benchmarks.tier_traces import TraceRows
from benchmarks.tiers import Answering
from interpose.contract.errors import InterposeError
from serve_app.settings import ModelSettings

# All of them have small constants: large constants are uploaded to a session, and there is none.
NAMES = ("plain", "capture one", "capture all", "steer")
BATCHES = (1, 32)
ROUNDS = 12
SECONDS = 480.0  # seconds of a run, with the engines' starts
LEAST_SECONDS = 10.0  # seconds for a layout's rounds, however long the engines took to start
GOAL = 1.10  # the ratio at several ranks over the ratio at one
TOKENS, FEW_TOKENS = 128, 8  # new tokens of each request, and on a CPU
SHARES = (0.4, 1.0)  # of the time that is left to a layout, for each of `BATCHES`
STAGED_TOKENS = 16  # over pipeline stages, where no block runs in captured graphs
KV_CACHE = 1 << 30  # bytes: the requests of a batch need a fraction of it
SPARED = 0.05  # part of a GPU's memory that engines with such a cache do not need, of what `Model.write` asks for


def run(
    *,
    tensor_parallel_sizes: Sequence[int] | None = None,
    layouts: Sequence[str] | None = None,
    model: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    seconds: float | None = None,
    service: bool | None = None,
) -> dict[str, dict[str, float]]:
    """Return ms/step of each row by layout, and its ratio to stock and to one rank.

    Args:
        tensor_parallel_sizes: by default 1 and 2, and 4 where there are GPUs for that.
        layouts: further layouts, see `Layout.of`; without sizes these alone.
        model, dtype: see `Model.chosen`.
        rounds: rounds of each batch size, at most.
        seconds: seconds of the run, with the engines' starts.
        service: whether the rows run through a service too.

    Raises:
        ValueError: there are fewer GPUs than ranks.
        RuntimeError: no layout was measured; a layout whose engines end is left out, with a message.
    """
    measured_model = Model.chosen(model, dtype)
    chosen = chosen_layouts(measured_model, tensor_parallel_sizes, layouts)
    ends = time.monotonic() + (seconds or SECONDS)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        options = measured_model.write(Path(folder))
        options["enable_prefix_caching"] = False
        if measured_model.gpu:
            options["kv_cache_memory_bytes"] = KV_CACHE
            options["gpu_memory_utilization"] -= SPARED
        count = (3 if service else 2) * len(chosen)
        at_once = measured_model.gpu and count * options["gpu_memory_utilization"] <= MEMORY
        one_by_one = not measured_model.gpu  # All ranks start on the same few cores.
        groups = [_engines(layout, folder, options, bool(service), one_by_one) for layout in chosen]
        started = [stack.enter_context(group) for group in groups] if at_once else []
        for one in started:
            stack.callback(one.stop)  # all before the first is waited for
        for index, layout in enumerate(chosen):
            with contextlib.ExitStack() as alone:
                try:
                    engines = started[index] if at_once else alone.enter_context(groups[index])
                    began = time.monotonic()
                    engines.wait(layout)
                    waited = time.monotonic() - began
                    print(f"  {layout.name}: {len(engines.asked)} engines run after {waited:.0f} s more", flush=True)
                    left = max(LEAST_SECONDS, (ends - time.monotonic()) / (len(chosen) - index))
                    for name, figures in _rows(engines.asked, measured_model, layout, rounds, left):
                        found[f"{measured_model.size}, {layout.name}, {name}"] = figures
                        print(f"  {layout.name}, {name}: {_shown(figures)}", flush=True)
                except RuntimeError as error:
                    print(f"  {layout.name}: an engine ended: {error}", flush=True)
    if not found:
        raise RuntimeError("no layout was measured")
    return found | compared(found)


def chosen_layouts(model: Model, sizes: Sequence[int] | None, layouts: Sequence[str] | None) -> list[Layout]:
    """Return the layouts to measure; raises ValueError if there are fewer GPUs than ranks."""
    given = [Layout(size) for size in sizes or ()] + [Layout.of(text) for text in layouts or ()]
    ranks = model.layouts([layout.ranks for layout in given] or None)
    return given or [Layout(size) for size in ranks]


def _rows(
    asked: dict[str, Asked], model: Model, layout: Layout, rounds: int | None, seconds: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of each batch size and row of a layout."""
    began = time.monotonic()
    tokens = FEW_TOKENS if not model.gpu else STAGED_TOKENS if layout.pipeline > 1 else TOKENS
    for share, batch in zip(SHARES, BATCHES, strict=True):
        request = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "tokens": tokens}
        left = (seconds - (time.monotonic() - began)) * share
        for name, figures in _measured(asked, request, rounds or (ROUNDS if model.gpu else 2), left):
            yield f"batch {batch}, {name}", figures


def _shown(figures: dict[str, float]) -> str:
    shown = f"{figures['ms/step']:.4g} ms/step"
    if "ratio" in figures:
        shown += f", ratio {figures['ratio']:.3f} ({figures['quartile 1']:.3f} to {figures['quartile 3']:.3f})"
    return f"{shown}, {figures['rounds']} rounds"


class _Stock:
    """A stock engine, which runs every row's batch without blocks.

    Args:
        child: its process.
    """

    def __init__(self, child: Asked) -> None:
        self._child = child

    def ask(self, row: str = "plain", **request: Any) -> Any:
        """Return the seconds of a batch."""
        return self._child.ask(**request)


@dataclass
class _Engines:
    """The engines of one layout.

    Attributes:
        asked: "stock", "engine" and, if it was asked for, "service".
        stop: lets all of them end, without waiting for them.
    """

    asked: dict[str, Asked]
    stop: Callable[[], None]

    def wait(self, layout: Layout) -> None:
        """Wait until all run; an engine that does not start is left out, with a message.

        Raises:
            RuntimeError: stock vLLM does not start.
        """
        for kind, engine in list(self.asked.items()):
            try:
                engine.ask(row="plain", batch=1, prompt_tokens=PROMPT_TOKENS, tokens=1)
            except (RuntimeError, InterposeError) as error:
                if kind == "stock":
                    raise
                print(f"  {layout.name}: the {kind} does not count: {error}", flush=True)
                del self.asked[kind]


@contextlib.contextmanager
def _engines(
    layout: Layout, checkpoint: str, options: dict[str, Any], served: bool, one_by_one: bool
) -> Iterator[_Engines]:
    """Start the engines of a layout; end all.

    It waits for none of them, unless they start one by one.
    """
    if layout.pipeline > 1:
        options = {**options, "enforce_eager": False}  # Eager stages of stock vLLM fail on CPUs.
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as stops:
        engines = _Engines({}, stops.close)
        for kind, module in (("stock", "benchmarks.stock_engine"), ("engine", "benchmarks.tier_ranks_child")):
            argv = (checkpoint, str(layout), json.dumps(options))
            child = Child(module, *argv, environment={"VLLM_PLUGINS": "none"})
            stack.callback(child.close)
            stops.callback(child.stop)
            engines.asked[kind] = _Stock(child) if kind == "stock" else Answering(child)
            if one_by_one:
                engines.wait(layout)
        if served:
            model = {**switched_on(ModelSettings), "pipeline_parallel_size": layout.pipeline}
            service = Service(layout.tensor, 1, options, Path(checkpoint), model=model)
            stack.callback(_close, service)
            stops.callback(service.stop)
            engines.asked["service"] = Answering(stops.enter_context(TraceRows(service.address)))
        yield engines


def _close(service: Service) -> None:
    """End a service; a message says if it had to be killed, as the figures are there."""
    try:
        service.close()
    except RuntimeError as error:
        print(f"  {error}", flush=True)


def _measured(
    asked: dict[str, Asked], request: dict[str, Any], rounds: int, seconds: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of the stock engine and its control, and of each row.

    Args:
        asked: "stock", "engine" and, if there is one, "service".
        request: what all rows have in common.
        rounds: at most.
        seconds: after which no further round begins.
    """
    began = time.monotonic()
    cases: list[tuple[str, Asked, dict[str, Any]]] = [(name, asked["stock"], request) for name in ("stock", "control")]
    for row in NAMES:
        for kind in ("engine", "service"):
            if kind not in asked:
                continue
            name = row if kind == "engine" else f"{row}: {kind}"
            given = {**request, "row": row}
            try:
                for _ in range(2):  # The first run prepares what the others use.
                    asked[kind].ask(**given)
            except RuntimeError as error:
                print(f"  {name} does not count: {error}", flush=True)
                continue
            cases.append((name, asked[kind], given))
    asked["stock"].ask(**request)
    left = max(0.0, seconds - (time.monotonic() - began))
    base, *others = alternate(cases, rounds, False, left)
    taken = {one.name: one for one in others}
    for one in (base, *others):
        figures = {"ms/step": one.median / request["tokens"] * 1e3}
        if one is not base:
            figures |= one.over(base).figures() | _to_engine(one, taken)
        yield one.name, {**figures, "rounds": len(one.seconds)}


def _to_engine(one: Measured, taken: dict[str, Measured]) -> dict[str, float]:
    """Return the ratio of a row through the service to the same row through the engine."""
    row, _, kind = one.name.partition(": ")
    return {"to engine": one.over(taken[row]).median} if kind and row in taken else {}


def compared(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return, for each row at several ranks, its ratio to stock over that at one rank.

    Args:
        found: the figures by "MODEL, LAYOUT, batch B, ROW".
    """
    rows = {}
    for case, figures in found.items():
        model, layout, batch, row = case.split(", ")
        one = found.get(f"{model}, {Layout(1).name}, {batch}, {row}", {})
        if layout != Layout(1).name and "ratio" in figures and one.get("ratio"):
            rows[f"{case}: over one rank"] = {"ratio": figures["ratio"] / one["ratio"], "goal": GOAL}
    return rows
