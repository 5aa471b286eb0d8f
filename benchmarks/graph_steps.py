"""What blocks cost an engine as it is deployed.

On a GPU the engine is compiled, with CUDA graphs and asynchronous scheduling. The model has the sizes of a 1B llama, random
weights in bfloat16, and stock vLLM is measured with its graphs and without. Elsewhere the model is small and both are eager. The
ratio is to the stock engine as it is deployed; the control is a second stock engine. Steps with a block run eager, so "stock
eager" is the figure to compare a block's own cost with.

As in `benchmarks.plain_decode`, two processes of the same engine differ for as long as they live, by more than plain requests'
ratio to stock. So plain requests are measured with several engines of each kind (`--engines`), and a round counts with their
median. Blocks are measured with one engine of each kind.

All cases of a run are measured on the same engines. Each case gets about `--seconds`, the engines' start included. Rounds that do
not fit are left out; the table says how many there were. `--case` runs cases one by one.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.rounds import Child, Measured, alternate

MEMORY = 0.9  # part of a GPU that all engines together may ask for
SECONDS = 300.0  # seconds of a case, with its part of the engines' starts
ENGINES = 3  # engines of each kind, on a GPU
PROMPT_TOKENS = 64
NAMES = {"stock": "stock", "control": "stock", "stock eager": "stock", "interpose": "interpose"}


@dataclass(frozen=True)
class Group:
    """Cases that are measured in the same rounds.

    Attributes:
        batch: requests at a time.
        rounds: rounds with each engine, at most; fewer on a CPU.
        stock: the engines without blocks that are measured beside them.
        blocks: by the name in the table, the number of requests with a block, and the block.
        warm_up: whether a round comes before the counted rounds.
        plain_only: whether the time is that of the requests without a block, which go on while the others wait.
        typical: whether the time is that of the middle steps (see `benchmarks.engine_child`).
        several: whether all engines of a kind are measured, not one.
    """

    batch: int
    rounds: int
    stock: tuple[str, ...]
    blocks: dict[str, tuple[int, str]]
    warm_up: bool = True
    plain_only: bool = False
    typical: bool = False
    several: bool = False

    @property
    def kinds(self) -> set[str]:
        """The kinds of the engines that are measured."""
        return {*self.stock, "interpose"}


STOCK = ("stock", "control")
# Cases with the longest rounds come first, and leave the remaining time to the others.
CASES = {
    "batch-of-blocks": (
        Group(
            32,
            2,
            (*STOCK, "stock eager"),
            {
                "capture one layer of each": (32, "capture one layer, all steps"),
                "steer one layer of each": (32, "steer one layer, all steps"),
                "capture all layers of each": (32, "capture all layers, all steps"),
            },
            warm_up=False,
        ),
    ),
    "one-request": (
        Group(
            1,
            8,
            (*STOCK, "stock eager"),
            {
                "capture one layer, prompt": (1, "capture one layer, prompt"),
                "capture one layer": (1, "capture one layer, all steps"),
                "capture all layers": (1, "capture all layers, all steps"),
                "steer one layer": (1, "steer one layer, all steps"),
            },
        ),
    ),
    "batch": (
        Group(
            32,
            8,
            (*STOCK, "stock eager"),
            {"31 plain beside 1 captured": (1, "capture one layer, all steps")},
            plain_only=True,
        ),
    ),
    "plain": (
        Group(1, 400, STOCK, {"plain": (0, "")}, typical=True, several=True),
        Group(32, 400, STOCK, {"plain": (0, "")}, typical=True, several=True),
    ),
}


def run(
    *,
    cases: Sequence[str] | None = None,
    model: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    engines: int | None = None,
    seconds: float | None = None,
) -> dict[str, dict[str, float]]:
    """Return ms/step of each case, and its ratio to stock vLLM as it is deployed.

    The case "plain" has the typical step's time.

    Args:
        cases: names of `CASES`; None for all.
        model, dtype: see `Model.chosen`.
        rounds: rounds with each engine, at most; by default each group's own number, and two on the CPU.
        engines: engines of each kind that plain requests are measured with; by default three on a GPU, and one on a CPU.
        seconds: seconds of each case.
    """
    measured_model = Model.chosen(model, dtype)
    tokens = 128 if measured_model.gpu else 8
    with tempfile.TemporaryDirectory() as folder:
        options = measured_model.write(Path(folder))
        options |= {"async_scheduling": None, "skip_tokenizer_init": True, "disable_log_stats": True}
        groups = {case: CASES[case] for case in CASES if case in (cases or CASES)}
        bench = _Bench(groups, folder, options, tokens)
        bench.measure(
            engines or (ENGINES if measured_model.gpu else 1),
            rounds or (0 if measured_model.gpu else 2),
            (seconds or SECONDS) * len(groups),
        )
        return bench.figures()


class _Bench:
    """Engines of every kind, and their measured times.

    Args:
        cases: the groups of each case, by its name.
        folder: folder of the checkpoint.
        options: vLLM's options of all engines.
        tokens: new tokens of each request.
    """

    def __init__(self, cases: Mapping[str, Sequence[Group]], folder: str, options: dict[str, Any], tokens: int) -> None:
        self._groups = [(case, group) for case, groups in cases.items() for group in groups]
        self._folder = folder
        self._options = options
        self._tokens = tokens
        self._measured: dict[tuple[int, str], Measured] = {}

    def measure(self, engines: int, rounds: int, seconds: float) -> None:
        """Measure the groups, one after another.

        Args:
            engines: engines of each kind that has several. A round's time is the median of their times in it.
            rounds: rounds of each group, at most; 0 for the group's own number.
            seconds: seconds in all, the engines' start included.
        """
        began = time.monotonic()
        children = self._start(engines)
        try:
            print(f"  {len(children)} engines run after {time.monotonic() - began:.0f} s", flush=True)
            for number, (_, group) in enumerate(self._groups):
                share = max(0.0, began + seconds - time.monotonic()) / (len(self._groups) - number)
                self._group(number, children, rounds or group.rounds, share)
        finally:
            for child in children.values():
                child.stop()
            for child in children.values():
                child.close()

    def _start(self, engines: int) -> dict[tuple[str, int], Child]:
        """Start the engines; return them when they answer.

        Kinds with several engines get `engines` of them. All start at the same time, which takes no longer than the machine
        needs to compile as many models.
        """
        children = {}
        wanted = {
            (name, number)
            for _, group in self._groups
            for name, number in itertools.product(group.kinds, range(engines if group.several else 1))
        }
        memory = min(self._options["gpu_memory_utilization"], MEMORY / len(wanted))
        for name, number in sorted(wanted):
            options = {**self._options, "gpu_memory_utilization": memory}
            options |= {"enforce_eager": True} if name == "stock eager" else {}
            child = Child("benchmarks.engine_child", NAMES[name], self._folder, json.dumps(options))
            children[name, number] = child
        try:
            for child in children.values():
                child.ask(batch=1, prompt_tokens=PROMPT_TOKENS, tokens=1)
        except BaseException:
            for child in children.values():
                child.close()
            raise
        return children

    def _group(self, number: int, children: dict[tuple[str, int], Child], rounds: int, seconds: float) -> None:
        case, group = self._groups[number]
        request: dict[str, Any] = {
            "batch": group.batch,
            "prompt_tokens": PROMPT_TOKENS,
            "tokens": self._tokens,
            "typical": group.typical,
        }
        asked = {name: (name, request) for name in group.stock}
        for name, (traced, work) in group.blocks.items():
            asked[name] = "interpose", {**request, "work": work, "traced": traced, "plain_only": group.plain_only}
        engines = sorted({engine for kind, engine in children if kind in group.kinds}) if group.several else [0]
        every = [
            (f"{name}, {engine}", children[kind, engine], given)
            for engine in engines
            for name, (kind, given) in asked.items()
        ]
        took = {one.name: one.seconds for one in alternate(every, rounds, group.warm_up, seconds)}
        for name in asked:
            each_round = zip(*(took[f"{name}, {engine}"] for engine in engines), strict=True)
            one = Measured(name, [statistics.median(seconds) for seconds in each_round])
            self._measured[number, name] = one
            step = one.median / self._tokens * 1e3
            print(f"  {case}: batch {group.batch}, {name}: {step:.4g} ms/step, {len(one.seconds)} rounds", flush=True)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the table's rows.

        Other work of the host only adds time, so the fastest round stands beside the median.
        """
        rows: dict[str, dict[str, float]] = {}
        for (number, name), one in self._measured.items():
            case, group = self._groups[number]
            base = self._measured[number, "stock"]
            row = {"ms/step": one.median / self._tokens * 1e3, "fastest": min(one.seconds) / self._tokens * 1e3}
            if one is not base:
                row |= one.over(base).figures()
            # The stock engines are in every group, and their rows name the group.
            beside = f" beside {next(iter(group.blocks))}" if name in group.stock else ""
            rows[f"{case}: batch {group.batch}, {name}{beside}"] = {**row, "rounds": len(one.seconds)}
        return rows
