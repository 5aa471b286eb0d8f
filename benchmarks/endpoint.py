"""The OpenAI-compatible endpoint beside `vllm serve`: the same plain requests by turns.

Each has a process of the engine with the same model and settings. A round asks both for each case, so that both have the same
neighbours; the ratio is taken in each round. A model of a millisecond a step shows what a request and a piece of an answer cost;
a model as wide as small trained ones shows what a user sees.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rounds import LEAST, Measured
from benchmarks.served import START_SECONDS, STOP_SECONDS, Service, free_port
from benchmarks.tensor_parallel import POLLING_SECONDS
from interpose.cli.demo_model import Shape, write_demo_model

MODEL = "llama"
TOKENS = 64
AT_ONCE = 8
ROUNDS = 20
WARM_ROUNDS = 2
# The sizes of the models. The second has 100 million parameters.
SHAPES = {"tiny": Shape(), "100m": Shape(layers=24, hidden=576, heads=9, kv_heads=3, vocab=8000)}
CACHE_BYTES = 1 << 30  # vLLM would take most of a machine's memory; a service's engine on a CPU takes this
_PROMPT = "The Eiffel Tower is in"

# Each case: the path, what the body has beside model and sampling, and how many requests are there at a time.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "one completion": ("/completions", {"prompt": _PROMPT}, 1),
    "one completion, streamed": ("/completions", {"prompt": _PROMPT, "stream": True}, 1),
    "one chat": ("/chat/completions", {"messages": [{"role": "user", "content": _PROMPT}]}, 1),
    f"{AT_ONCE} completions": ("/completions", {"prompt": _PROMPT}, AT_ONCE),
}


def run(*, rounds: int | None = None) -> dict[str, dict[str, float]]:
    """Return for each case the milliseconds of both, and the ratio to `vllm serve`.

    Args:
        rounds: rounds that count, two at least; default: 20.
    """
    found = {}
    for size, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_demo_model(Path(folder) / "llama", "llama", shape)
            with stock(checkpoint) as theirs, ours(checkpoint) as mine:
                bases = {"vllm": theirs, "interpose": mine}
                for case, figures in measured(bases, max(rounds or ROUNDS, LEAST)).items():
                    found[f"{size}, {case}"] = figures
                    print(f"  {size}, {case}: ratio {figures['ratio']:.2f}", flush=True)
    return found


def measured(bases: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures of each case.

    Args:
        bases: the addresses of "vllm" and "interpose", up to "/v1".
        rounds: rounds that count.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    pause = 0.0 if (os.cpu_count() or 1) >= 8 else POLLING_SECONDS
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        clients = {
            name: stack.enter_context(httpx.Client(base_url=base, timeout=120.0)) for name, base in bases.items()
        }
        texts = {name: _asked(client, *CASES["one completion"][:2]) for name, client in clients.items()}
        if len(set(texts.values())) > 1:
            raise RuntimeError(f"both must generate the same: {texts}")
        for number in range(WARM_ROUNDS + rounds):
            for case, (path, body, count) in CASES.items():
                order = list(clients) if number % 2 else list(clients)[::-1]
                for name in order:
                    begun = time.perf_counter()
                    list(pool.map(partial(_asked, clients[name], path), [body] * count))
                    if number >= WARM_ROUNDS:
                        seconds.setdefault((case, name), []).append(time.perf_counter() - begun)
                    time.sleep(pause)
    found = {}
    for case in CASES:
        mine, theirs = (Measured(case, seconds[case, name]) for name in ("interpose", "vllm"))
        columns = {"ms": mine.median * 1e3, "vllm serve ms": theirs.median * 1e3}
        found[case] = columns | mine.over(theirs).figures()
    return found


def _asked(client: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """Send a request and read its whole answer; return the generated text."""
    sampling = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    answer = client.post(path, json=body | sampling)
    answer.raise_for_status()
    if body.get("stream"):
        return answer.text
    choice = answer.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@contextlib.contextmanager
def ours(checkpoint: Path) -> Iterator[str]:
    """Serve a model with interpose; yields the endpoint's base."""
    port = free_port()
    service = Service(1, 1, checkpoint=checkpoint, settings={"http": {"port": port}})
    try:
        service.address()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        service.close()


@contextlib.contextmanager
def stock(checkpoint: Path) -> Iterator[str]:
    """Serve a model with `vllm serve`; yields the endpoint's base.

    Raises:
        RuntimeError: it does not start; with its output.
    """
    port = free_port()
    # The module that `vllm serve` runs. The command itself asks for a distribution named vllm, which the build for CPUs is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", MODEL, "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(CACHE_BYTES)]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ), start_new_session=True)
        try:
            _wait(lambda: httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200, process, Path(log.name))
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if ready():
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vllm serve did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)
