"""The time that a client waits: for a session, a small trace, eight clients at once, saves."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import interpose
from benchmarks.served import served

PROMPT = "The Eiffel Tower is in"
SAMPLING = {"max_tokens": 1, "temperature": 0.0}
LAYER = 2

OPENS = 40
CLIENTS = 8
TRACES = 40  # traces of each kind, from one client
TRACES_AT_ONCE = 10  # traces of each client
SAVES = {1: 12, 16: 8, 64: 5}  # number of saves by their size in MiB
WARM_SESSIONS = 2
REFILL_SECONDS = 60.0

_MIB = 1 << 20


def run() -> dict[str, dict[str, float]]:
    """Return the figures of each case; the service has two tensor-parallel workers."""
    results: dict[str, dict[str, float]] = {}
    with served(tensor_parallel_size=2, warm=WARM_SESSIONS) as address, ExitStack() as stack:
        clients = [stack.enter_context(interpose.connect(address, progress=False)) for _ in range(CLIENTS)]
        results["open a session"] = latency(_opens(clients))
        results |= _single_traces(clients[0].model())
        results[f"{CLIENTS} clients at once"] = _at_once([client.model() for client in clients])
        for size, count in SAVES.items():
            results[f"save of {size} MiB"] = _transfer(clients[0].model(), size * _MIB, count)
    return results


def latency(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95th percentile of some durations as columns of a table."""
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"p50 ms": statistics.median(seconds) * 1e3, "p95 ms": cuts[18] * 1e3}


def _opens(clients: Sequence[interpose.Client]) -> list[float]:
    """Return the seconds of each opening of a session.

    The clients open one session after another and close them together.
    """
    seconds: list[float] = []
    while len(seconds) < OPENS:
        for client in clients:
            _refilled(client)
            seconds.append(timed(client.own_session.open))
        _refilled(clients[0])
        for client in clients:
            client.own_session.close()
    return seconds


def _refilled(client: interpose.Client) -> None:
    """Wait until the service has as many ready session actors as it keeps."""
    deadline = time.monotonic() + REFILL_SECONDS
    while client.status().warm_sessions < WARM_SESSIONS:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all session actors are ready after {REFILL_SECONDS:g} s")
        time.sleep(0.1)


def _single_traces(model: Any) -> dict[str, dict[str, float]]:
    """Time the same request with an empty block and with a block that saves, in turn."""
    kinds = {"trace, empty block": _nothing, "trace, one save": _one_save}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(TRACES + 3):
        for name, kind in kinds.items():
            took = timed(lambda kind=kind: kind(model))  # type: ignore[misc]
            if turn >= 3:  # the first ones warm up
                seconds[name].append(took)
    return {name: latency(values) for name, values in seconds.items()}


def _nothing(model: Any) -> None:
    with model.trace(PROMPT, **SAMPLING) as tracer:
        pass


def _one_save(model: Any) -> Any:
    with model.trace(PROMPT, **SAMPLING) as tracer:
        hidden = model.model.layers[LAYER].output[0].save()
    return hidden


def _at_once(models: Sequence[Any]) -> dict[str, float]:
    """Let every client run traces with one save, one after another.

    All clients run at the same time.
    """
    seconds: list[float] = []
    failures: list[Exception] = []
    start = threading.Barrier(len(models) + 1)

    def work(model: Any) -> None:
        try:
            _one_save(model)  # opens the session
        finally:
            start.wait()
        for _ in range(TRACES_AT_ONCE):
            seconds.append(timed(lambda: _one_save(model)))

    def guarded(model: Any) -> None:
        try:
            work(model)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if failures:
        raise failures[0]
    return {"traces/s": len(seconds) / took, **latency(seconds)}


def _transfer(model: Any, size: int, count: int) -> dict[str, float]:
    """Time a trace that saves one float32 tensor of `size` bytes."""
    seconds: list[float] = []
    for _ in range(count + 1):
        seconds.append(timed(lambda: _large_save(model, size // 4)))
    middle = statistics.median(seconds[1:])  # the first one warms up
    return {"p50 ms": middle * 1e3, "MiB/s": size / _MIB / middle}


def _large_save(model: Any, numbers: int) -> None:
    with model.trace(PROMPT, **SAMPLING):
        values = model.model.layers[LAYER].output[0].new_full((numbers,), 1.0).save()
    if tuple(values.shape) != (numbers,):
        raise RuntimeError(f"{numbers} numbers were saved, {tuple(values.shape)} came")


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
