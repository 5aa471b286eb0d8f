"""What blocks cost, beside other libraries that run code inside vLLM's forward pass.

Every library has an engine of its own, all on one GPU, with the same model, prompts and sampling. The engines answer one at a
time, in alternating rounds. The ratio is to stock vLLM as it is deployed, compiled and with CUDA graphs; the control is a second
stock engine. A time is that of the whole batch, from the first request to the last value, divided by the number of new tokens.

nnsight 0.8.1 and vllm-lens 1.3.0 are installed by hand, without their dependencies, which would change vLLM's version:
`pip install --no-deps nnsight==0.8.1 vllm-lens==1.3.0 zstandard websocket-client`. A library that is not installed, or whose
engine does not start, has no rows, and the benchmark says so. `nnsight-taps` is nnsight with every layer's output declared before
the engine starts, which lets nnsight keep CUDA graphs.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.graph_steps import MEMORY, PROMPT_TOKENS
from benchmarks.models import Model
from benchmarks.peer_child import KINDS
from benchmarks.rounds import Child, alternate

SECONDS = 450.0  # seconds of all cases, without the engines' starts
PACKAGES = {"nnsight": "nnsight", "nnsight-taps": "nnsight", "vllm-lens": "vllm_lens"}
STOCK = ("stock", "control", "stock eager")

# Batch, requests with a block, block, and the share of the time. Cases with the longest rounds come last.
CASES: dict[str, tuple[int, int, str, float]] = {
    "plain, batch 1": (1, 0, "", 1),
    "plain, batch 32": (32, 0, "", 1),
    "capture one layer, batch 1": (1, 1, "capture one layer, all steps", 1),
    "steer one layer, batch 1": (1, 1, "steer one layer, all steps", 1),
    "capture all layers, batch 1": (1, 1, "capture all layers, all steps", 1),
    "31 plain beside 1 captured": (32, 1, "capture one layer, all steps", 1),
    "capture one layer, batch 32": (32, 32, "capture one layer, all steps", 2),
    "steer one layer, batch 32": (32, 32, "steer one layer, all steps", 2),
    "capture all layers, batch 32": (32, 32, "capture all layers, all steps", 4),
}


def run(
    *, model: str | None = None, dtype: str | None = None, rounds: int | None = None, seconds: float | None = None
) -> dict[str, dict[str, float]]:
    """Return ms/step of each library in each case, and its ratio to stock vLLM.

    Args:
        model, dtype: see `Model.chosen`.
        rounds: rounds of each case, at most.
        seconds: seconds of all cases, without the engines' starts.
    """
    measured_model = Model.chosen(model, dtype)
    tokens = 128 if measured_model.gpu else 8
    with tempfile.TemporaryDirectory() as folder:
        options = measured_model.write(Path(folder))
        options |= {"disable_log_stats": True, "max_num_seqs": 64}
        children = _start(folder, options)
        try:
            return _measure(children, tokens, rounds or (40 if measured_model.gpu else 2), seconds or SECONDS)
        finally:
            for child in children.values():
                child.stop()
            for child in children.values():
                child.close()


def _start(folder: str, options: dict[str, Any]) -> dict[str, Child]:
    """Start an engine of every kind that can be had; return the engines that answer."""
    peers = [kind for kind in KINDS if importlib.util.find_spec(PACKAGES[kind]) is not None]
    for kind in KINDS:
        if kind not in peers:
            print(f"  {kind}: {PACKAGES[kind]} is not installed", flush=True)
    kinds = [*STOCK, "interpose", *peers]
    memory = min(options["gpu_memory_utilization"], MEMORY / len(kinds))
    shared = {**options, "gpu_memory_utilization": memory}
    own = {"async_scheduling": None, "skip_tokenizer_init": True}
    children: dict[str, Child] = {}
    for kind in kinds:
        if kind in KINDS:
            # vllm-lens is found as a plugin of vLLM, and must be found in its own engine alone.
            environment = {"VLLM_PLUGINS": None if kind == "vllm-lens" else "none"}
            argv = ("benchmarks.peer_child", kind, folder, json.dumps(shared))
        else:
            environment = {"VLLM_PLUGINS": "none"}
            given = shared | own | ({"enforce_eager": True} if kind == "stock eager" else {})
            argv = (
                "benchmarks.engine_child",
                "interpose" if kind == "interpose" else "stock",
                folder,
                json.dumps(given),
            )
        children[kind] = Child(*argv, environment=environment)
    began = time.monotonic()
    for kind, child in list(children.items()):
        try:
            child.ask(batch=1, prompt_tokens=PROMPT_TOKENS, tokens=1)
        except RuntimeError as error:
            if kind not in KINDS:
                raise
            print(f"  {kind} does not start: {error}", flush=True)
            children.pop(kind).close()
    print(f"  {len(children)} engines run after {time.monotonic() - began:.0f} s", flush=True)
    return children


def _measure(children: dict[str, Child], tokens: int, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    began = time.monotonic()
    left = sum(share for *_, share in CASES.values())
    for case, (batch, traced, work, share) in CASES.items():
        request: dict[str, Any] = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "tokens": tokens}
        asked = []
        gone: list[str] = []
        for kind, child in children.items():
            given = request if kind in STOCK else {**request, "work": work, "traced": traced}
            try:
                answer = child.ask(**given)  # warms up
            except RuntimeError as error:
                if kind not in KINDS:
                    raise
                answer = f"the engine ended: {error}"
                gone.append(kind)
            if isinstance(answer, str):
                print(f"  {case}: {kind} does not count: {answer}", flush=True)
            else:
                asked.append((kind, child, given))
        while gone:
            children.pop(gone.pop()).close()
        part = max(0.0, began + seconds - time.monotonic()) * share / left
        left -= share
        taken = {one.name: one for one in alternate(asked, rounds, False, part)}
        for kind, one in taken.items():
            figures = {"ms/step": one.median / tokens * 1e3}
            if kind != "stock":
                figures |= one.over(taken["stock"]).figures()
            rows[f"{case}: {kind}"] = {**figures, "rounds": len(one.seconds)}
            print(f"  {case}: {kind}: {figures['ms/step']:.4g} ms/step, {len(one.seconds)} rounds", flush=True)
    return rows
