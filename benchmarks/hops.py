"""What a trace costs each process of a service, alone and beside others.

The figures are CPU time and waiting, for 1, 8 and 32 traces at the same time. Each trace is a client's of its own, with a
session of its own, and saves one small tensor. The processes' idle time is measured before and taken off. The figures of the
worker and of the engine's core include their waiting for each other, which takes CPU time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psutil

import interpose
from benchmarks.models import prompts
from benchmarks.processes import ENGINE, title
from benchmarks.served import Service
from benchmarks.service import latency, timed

AT_ONCE = (1, 8, 32)
TOKENS = (1, 32)
TRACES = 96  # of each case
LAYER = 2
PROMPT_TOKENS = 16
IDLE_SECONDS = 3.0
# A process's name in the table, by a part of its title.
NAMES = {
    "ProxyActor": "proxy",
    "ServeReplica:interpose:ingress": "ingress",
    "ServeReplica:interpose": "engine",
    "SessionHost": "session",
    "Directory": "directory",
    ENGINE: "core",
    "LazyWorker": "worker",
    "raylet": "raylet",
    "gcs_server": "gcs",
}


def run() -> dict[str, dict[str, float]]:
    """Return the milliseconds of each case.

    They are those of a trace, of the batch, and the CPU time of each process per trace.
    """
    service = Service(1, 1, {"enforce_eager": True, "max_model_len": 512})
    with ExitStack() as stack:
        stack.callback(service.close)
        address = service.address()
        clients = [stack.enter_context(interpose.connect(address, progress=False)) for _ in range(max(AT_ONCE))]
        batches = _Batches(
            [client.model() for client in clients], stack.enter_context(ThreadPoolExecutor(len(clients)))
        )
        batches.run(len(clients), 8, 4)  # opens the sessions and warms up
        processes = {one: _name(one) for one in service.process.children(recursive=True)}
        idle = _idle(processes)
        return {
            f"{count} at once, {tokens} new tokens": _case(batches, count, tokens, processes, idle)
            for count in AT_ONCE
            for tokens in TOKENS
        }


class _Batches:
    """Runs batches of traces, each trace from a client and a thread of its own."""

    def __init__(self, models: list[Any], threads: ThreadPoolExecutor) -> None:
        self._models = models
        self._threads = threads
        self._prompts = prompts(PROMPT_TOKENS)

    def run(self, count: int, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
        """Return the seconds of each batch and of each trace."""
        batches, traces = [], []
        for _ in range(rounds):
            given = [(self._models[number], next(self._prompts)) for number in range(count)]
            began = time.perf_counter()
            traces += list(self._threads.map(lambda one: timed(lambda: _trace(*one, tokens)), given))
            batches.append(time.perf_counter() - began)
        return batches, traces


def _trace(model: Any, prompt: list[int], tokens: int) -> Any:
    with model.trace(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
        hidden = model.model.layers[LAYER].output[0].save()
    return hidden


def _case(
    batches: _Batches, count: int, tokens: int, processes: Mapping[psutil.Process, str], idle: Mapping[str, float]
) -> dict[str, float]:
    rounds = max(3, TRACES // count // (4 if tokens > 1 else 1))
    before, began = _cpu(processes), time.perf_counter()
    of_batches, of_traces = batches.run(count, tokens, rounds)
    time.sleep(0.3)  # some work follows the last answer
    took = time.perf_counter() - began
    spent = _cpu(processes)
    figures = latency(of_traces) | {"batch p50 ms": statistics.median(of_batches) * 1e3}
    for name in dict.fromkeys(["client", *NAMES.values()]):
        seconds = spent[name] - before[name] - idle.get(name, 0.0) * took
        figures[f"{name} ms"] = max(0.0, seconds) * 1e3 / (rounds * count)
    return figures


def _idle(processes: Mapping[psutil.Process, str]) -> dict[str, float]:
    """Return the part of a core that each process takes when there is nothing to do."""
    before = _cpu(processes)
    time.sleep(IDLE_SECONDS)
    after = _cpu(processes)
    return {name: (after[name] - before[name]) / IDLE_SECONDS for name in after}


def _cpu(processes: Mapping[psutil.Process, str]) -> Counter[str]:
    """Return the seconds of CPU time of each kind of process so far."""
    found: Counter[str] = Counter()
    for process, name in processes.items():
        times = process.cpu_times()
        found[name] += times.user + times.system  # type: ignore[assignment]
    own = os.times()
    found["client"] += own.user + own.system  # type: ignore[assignment]
    return found


def _name(process: psutil.Process) -> str:
    said = title(process)
    return next((name for part, name in NAMES.items() if part in said), "other")
