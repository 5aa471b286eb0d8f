"""The rows of `benchmarks.tiers` as a notebook writes them, run through a whole service.

A batch is as many traces at the same time, each from a thread of its own with a session in common, or one trace with as many
prompts.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import interpose
from benchmarks.models import prompts
from benchmarks.tier_rows import LAYER, ROWS, TOP, constants

MOST = 256  # traces at a time
# vLLM's workers poll for their next step for a second before they sleep, which takes the cores from other engines.
POLLING_SECONDS, ENOUGH_CORES = 1.1, 8

Trace = Callable[[Any, Sequence[list[int]], dict[str, Any], dict[str, Any]], Sequence[Any]]


def _plain(model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]) -> Sequence[Any]:
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                pass
    return []


def _capture_one(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    kept: list[Any] = []
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                kept = []
                for _ in tracer.iter[:]:
                    kept.append(model.model.layers[LAYER].output[0].save())
    return kept


def _capture_all(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    kept: list[Any] = []
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                kept = []
                for _ in tracer.iter[:]:
                    for layer in model.model.layers:
                        kept.append(layer.output[0].save())
    return kept


def _capture_prompt(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    kept: list[Any] = []
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                kept = [model.model.layers[LAYER].output[0].save()]
    return kept


def _steer(model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]) -> Sequence[Any]:
    vector = values["vector"]
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    model.model.layers[LAYER].output[0][:] += vector
    return []


def _sae(model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]) -> Sequence[Any]:
    W_enc, b_enc, W_dec = values["W_enc"], values["b_enc"], values["W_dec"]
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    h = model.model.layers[LAYER].output[0]
                    features = torch.relu(h @ W_enc + b_enc)
                    h[:] += 0.1 * (features @ W_dec - h)
    return []


def _probe(model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]) -> Sequence[Any]:
    W = values["W"]
    kept: list[Any] = []
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                kept = []
                for _ in tracer.iter[:]:
                    h = model.model.layers[LAYER].output[0]
                    kept.append(torch.relu(h @ W).topk(TOP).values.save())
    return kept


def _decide_one(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    vector = values["vector"]
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    h = model.model.layers[LAYER].output[0]
                    if float(h.norm()) > 0:
                        h[:] += vector
    return []


def _decide_all(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    vector = values["vector"]
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    for layer in model.model.layers:
                        h = layer.output[0]
                        if float(h.norm()) > 0:
                            h[:] += vector
    return []


def _unplannable_one(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    vector = values["vector"]
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    h = model.model.layers[LAYER].output[0]
                    try:
                        if float(h.norm()) > 0:
                            h[:] += vector
                    except ArithmeticError:
                        pass
    return []


def _unplannable_all(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    vector = values["vector"]
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    for layer in model.model.layers:
                        h = layer.output[0]
                        try:
                            if float(h.norm()) > 0:
                                h[:] += vector
                        except ArithmeticError:
                            pass
    return []


def _python_one(
    model: Any, some: Sequence[list[int]], sampling: dict[str, Any], values: dict[str, Any]
) -> Sequence[Any]:
    kept: list[Any] = []
    with model.trace(**sampling) as tracer:
        for prompt in some:
            with tracer.invoke(prompt):
                seen: dict[int, int] = {}
                kept = []
                for step in tracer.iter[:]:
                    kept.append(model.model.layers[LAYER].output[0].save())
                    seen[step % 3] = seen.get(step % 3, 0) + 1
    return kept


TRACES: dict[str, Trace] = {
    "plain": _plain,
    "capture one": _capture_one,
    "steer": _steer,
    "sae": _sae,
    "probe": _probe,
    "capture all": _capture_all,
    "31 beside one": _capture_one,
    "first token": _capture_prompt,
    "decide one": _decide_one,
    "decide all": _decide_all,
    "unplannable one": _unplannable_one,
    "unplannable all": _unplannable_all,
    "python one": _python_one,
}


class TraceRows:
    """Runs timed batches through a service, one batch at a time.

    Args:
        address: returns the service's address, when the first batch is asked for.
        name: name of the model, a llama; None for the only model.
    """

    def __init__(self, address: Callable[[], str], name: str | None = None) -> None:
        self._name = name
        self._address = address
        self._client: interpose.Client | None = None
        self._model: Any = None
        self._layers = 0
        self._values: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(MOST)
        self._prompts: dict[int, Iterator[list[int]]] = {}

    def __enter__(self) -> TraceRows:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()
        if self._client is not None:
            self._client.close()

    def ask(self, row: str, batch: int, prompt_tokens: int, tokens: int, joined: bool = False) -> float | str:
        """Return the seconds of a batch until all values are here, or why it does not count.

        Args:
            row: one of `ROWS`.
            batch: requests of the batch.
            prompt_tokens, tokens: numbers of tokens of each request.
            joined: whether the batch is one trace, where all its requests have a block.
        """
        self._connect()
        given = self._prompts.setdefault(prompt_tokens, prompts(prompt_tokens))
        some = [next(given) for _ in range(batch)]
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        with warnings.catch_warnings():  # Of the prompts of one trace, the last one's values are left under the name.
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            try:
                took, kept = self._run(row, some, sampling, joined)
            except interpose.InterposeError as error:
                return f"{type(error).__name__}: {error}"
        took -= began
        if (os.cpu_count() or 1) < ENOUGH_CORES:
            time.sleep(POLLING_SECONDS)
        expected = ROWS[row].expected(self._layers, tokens)
        if wrong := {len(values) for values in kept} - {expected}:
            return f"{sorted(wrong)} values came instead of {expected}"
        return took

    def _run(
        self, row: str, some: Sequence[list[int]], sampling: dict[str, Any], joined: bool
    ) -> tuple[float, list[Sequence[Any]]]:
        """Run a batch; return the time of its end, and the values of its traces with a block."""
        traced = ROWS[row].traced
        trace = TRACES[row]
        if traced is None or traced == 0:
            parts = [some] if joined else [[prompt] for prompt in some]
            kept = list(self._threads.map(lambda part: trace(self._model, part, sampling, self._values), parts))
            return time.perf_counter(), kept
        blocks = [self._threads.submit(trace, self._model, [one], sampling, self._values) for one in some[:traced]]
        rest = [self._threads.submit(_plain, self._model, [one], sampling, self._values) for one in some[traced:]]
        for one in rest:
            one.result()
        ended = time.perf_counter()
        return ended, [one.result() for one in blocks]

    def _connect(self) -> None:
        if self._client is None:
            self._client = interpose.connect(self._address(), progress=False)
            self._model = self._client.model(self._name)
            self._layers = len(self._model.model.layers)
            hidden, dtype = self._sizes()
            self._values = constants(hidden, dtype)

    def _sizes(self) -> tuple[int, Any]:
        """Return the model's hidden size, and torch's type of its values."""
        model = self._model
        with model.trace([5, 6, 7, 8], max_tokens=1):
            hidden = model.model.layers[0].output[0].save()
        return hidden.shape[-1], hidden.dtype
