"""The time that a client waits, by tensor-parallel size: traces and saves, against stock.

For each size there are a whole service and, beside it, a stock engine: vLLM's own worker, runner and scheduler on the executor of
the service (`benchmarks.stock_engine`). Both have the same model and options. A round asks each of them for every case once.
"stock again" is the stock engine asked a second time; how far its ratio is from 1 says how much to trust the others. A trace's
time is that of the client's `with` block, over gRPC, with every saved value in the notebook. Stock's time is that of a request in
the engine's own process. Each prompt is new, so no prefix is cached.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interpose
from benchmarks.models import DTYPES, Model, prompts
from benchmarks.rounds import Asked, Child, Measured, alternate
from benchmarks.served import Service

ROUNDS = 6
LAYERS = 4  # layers whose MLP is saved
MEMORY = 0.95  # part of a GPU that all engines on it may ask for
# vLLM's workers poll for their next step for a second before they sleep, which takes the cores from the other engine.
POLLING_SECONDS = 1.1

_MIB = 1 << 20


@dataclass(frozen=True)
class Group:
    """Cases that are measured in the same rounds.

    Attributes:
        prompt_tokens, tokens: numbers of tokens of each request.
        traces: by the case's name, the trace of `TRACES`.
        mib: size of the tensor that stock vLLM brings from its first worker and that the traces save; 0 for none.
    """

    prompt_tokens: int
    tokens: int
    traces: dict[str, str]
    mib: int = 0


GROUPS = {
    "1 new token": Group(16, 1, {"trace, empty block": "nothing", "trace, one save": "one save"}),
    "32 new tokens": Group(
        16,
        32,
        {
            "trace, empty block": "nothing",
            "one layer saved in each step": "one layer in each step",
            "all layers saved in each step": "all layers in each step",
            "one layer steered in each step": "steering",
        },
    ),
    "2048-token prompt": Group(
        2048,
        1,
        {
            "all layers saved": "all layers",
            "all layers saved, left on the server": "all layers, left",
            f"MLP of {LAYERS} layers saved": "MLP",
        },
    ),
    "tensor of 64 MiB": Group(16, 1, {"saved by a trace": "tensor"}, mib=64),
}


def run(
    *,
    tensor_parallel_sizes: Sequence[int] | None = None,
    model: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
) -> dict[str, dict[str, float]]:
    """Return ms of each case by tensor-parallel size, its ratio to stock, and MiB/s of saves.

    Args:
        tensor_parallel_sizes: by default 1 and 2, and 4 where there are GPUs for that.
        model, dtype: see `Model.chosen`.
        rounds: counted rounds of each case.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    measured_model = Model.chosen(model, dtype)
    sizes = measured_model.layouts(tensor_parallel_sizes)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        options = measured_model.write(Path(folder))
        # Engines on GPUs take minutes to start and nothing while they wait.
        at_once = measured_model.gpu and 2 * len(sizes) * options["gpu_memory_utilization"] <= MEMORY
        pairs = [_engines(size, folder, options) for size in sizes]
        started = [stack.enter_context(pair) for pair in pairs] if at_once else []
        for service, stock in started:  # start all before waiting for the first
            stack.callback(service.stop)
            stack.callback(stock.stop)
        for index, size in enumerate(sizes):
            with contextlib.ExitStack() as one:
                service, stock = started[index] if at_once else one.enter_context(pairs[index])
                began = time.monotonic()
                with Traces(service.address(), DTYPES[measured_model.dtype]) as traces:
                    stock.ask(prompt_tokens=16, tokens=1)
                    print(f"  TP {size}: both engines run after {time.monotonic() - began:.0f} s", flush=True)
                    pause = 0.0 if (os.cpu_count() or 1) >= 4 * size else POLLING_SECONDS
                    for name, group in GROUPS.items():
                        for case, figures in _measure(group, stock, traces, rounds or ROUNDS, pause):
                            results[f"TP {size}, {name}, {case}"] = figures
                            print(f"  TP {size}, {name}, {case}: {figures['ms']:.4g} ms", flush=True)
    return results


@contextlib.contextmanager
def _engines(ranks: int, checkpoint: str, options: dict[str, Any]) -> Iterator[tuple[Service, Child]]:
    """Start both engines without waiting for them; end both afterwards."""
    with contextlib.ExitStack() as stack:
        service = Service(ranks, 1, options, Path(checkpoint))
        stack.callback(service.close)
        stock = Child("benchmarks.stock_engine", checkpoint, str(ranks), json.dumps(options))
        stack.callback(stock.close)
        stack.callback(service.stop)  # while the other ends
        yield service, stock


def _measure(
    group: Group, stock: Asked, traces: Traces, rounds: int, pause: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each case's name and figures."""
    request: dict[str, Any] = {"prompt_tokens": group.prompt_tokens, "tokens": group.tokens, "pause": pause}
    numbers = (group.mib * _MIB) // traces.number_bytes
    cases: list[tuple[str, Asked, dict[str, Any]]] = [
        (name, stock, {**request, "numbers": numbers}) for name in ("stock", "stock again")
    ]
    cases += [(name, traces, {**request, "trace": trace, "numbers": numbers}) for name, trace in group.traces.items()]
    base, *others = alternate(cases, rounds)
    saved = {"stock": group.mib * _MIB, "stock again": group.mib * _MIB}
    saved |= {name: traces.saved[trace] for name, trace in group.traces.items()}
    for one in (base, *others):
        yield one.name, _figures(one, base, saved[one.name])


def _figures(one: Measured, base: Measured, saved: int) -> dict[str, float]:
    figures = {"ms": one.median * 1e3}
    if one is not base:
        figures |= one.over(base).figures()
    # The small saves of every trace beside the text are no transfer to measure.
    return {**figures, "MiB/s": saved / _MIB / one.median} if saved >= _MIB else figures


class Traces:
    """Runs timed traces on a service, one at a time.

    Args:
        address: address of the service.
        number_bytes: bytes of one number of the model's type.
        name: name of the model, a llama; None for the only model.

    Attributes:
        saved: bytes that the latest trace of each kind saved.
    """

    def __init__(self, address: str, number_bytes: int, name: str | None = None) -> None:
        self._client = interpose.connect(address, progress=False)
        self._model = self._client.model(name)
        self._prompts: dict[int, Iterator[list[int]]] = {}
        self.number_bytes = number_bytes
        self.saved: dict[str, int] = {}

    def __enter__(self) -> Traces:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def ask(self, trace: str, prompt_tokens: int, tokens: int, pause: float, numbers: int) -> float:
        """Return the seconds of one trace.

        Args:
            trace: one of `TRACES`.
            prompt_tokens, tokens: numbers of tokens that the trace reads and generates.
            pause: seconds to wait before the trace.
            numbers: elements of the tensor that the trace makes, if it makes one.
        """
        prompt = next(self._prompts.setdefault(prompt_tokens, prompts(prompt_tokens)))
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        time.sleep(pause)
        began = time.perf_counter()
        kept = TRACES[trace](self._model, prompt, sampling, numbers)
        took = time.perf_counter() - began
        self.saved[trace] = sum(value.nbytes for value in kept)
        return took


Trace = Callable[[Any, list[int], dict[str, Any], int], list[Any]]  # returns the saved values


def _nothing(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling):
        pass
    return []


def _one_save(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling):
        hidden = model.model.layers[0].output[0].save()
    return [hidden]


def _one_layer_in_each_step(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling) as tracer:
        kept = [].save()  # type: ignore[attr-defined]
        for _ in tracer.iter[:]:
            kept.append(model.model.layers[0].output[0].save())
    return kept


def _all_layers_in_each_step(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling) as tracer:
        kept = [].save()  # type: ignore[attr-defined]
        for _ in tracer.iter[:]:
            for layer in model.model.layers:
                kept.append(layer.output[0].save())
    return kept


def _steering(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[0].output[0][:] *= 1.01
    return []


def _all_layers(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling):
        kept = [].save()  # type: ignore[attr-defined]
        for layer in model.model.layers:
            kept.append(layer.output[0].save())
    return kept


def _all_layers_left(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, fetch=False, **sampling):
        kept = [].save()  # type: ignore[attr-defined]
        for layer in model.model.layers:
            kept.append(layer.output[0].save())
    return kept


def _mlp(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling):
        kept = [].save()  # type: ignore[attr-defined]
        for layer in range(LAYERS):
            kept.append(model.blocks[layer].mlp.act.save())  # gathered over the ranks
    return kept


def _tensor(model: Any, prompt: list[int], sampling: dict[str, Any], numbers: int) -> list[Any]:
    with model.trace(prompt, **sampling):
        made = model.model.layers[0].output[0].new_full((numbers,), 1.0).save()
    if tuple(made.shape) != (numbers,):
        raise RuntimeError(f"{numbers} numbers were saved, {tuple(made.shape)} came")
    return [made]


TRACES: dict[str, Trace] = {
    "nothing": _nothing,
    "one save": _one_save,
    "one layer in each step": _one_layer_in_each_step,
    "all layers in each step": _all_layers_in_each_step,
    "steering": _steering,
    "all layers": _all_layers,
    "all layers, left": _all_layers_left,
    "MLP": _mlp,
    "tensor": _tensor,
}
