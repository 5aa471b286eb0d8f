"""Many clients at once, some with edits and some without: each gets what it gets alone, those without what stock vLLM gives.

Nothing is set here for that: a service takes a class of clients as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import torch

import interpose
from interpose.contract.version import PROTOCOL
from interpose.v1 import service_pb2, service_pb2_grpc
from tests.e2e.service import RunningService
from tests.e2e.test_calls import kinds, trace

WORDS = "the river runs through the city under the old bridges and past the museum".split()

_STOCK = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256)
params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
answers = llm.generate(json.loads(sys.argv[2]), params, use_tqdm=False)
print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


def prompt_of(number: int) -> str:
    return " ".join(WORDS[: 3 + number])


def stock_tokens(checkpoint: Path, prompts: list[str]) -> list[list[int]]:
    """What vLLM generates by itself, in a process that knows nothing of this system."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-c", _STOCK, str(checkpoint), json.dumps(prompts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [list(tokens) for tokens in json.loads(done.stdout.splitlines()[-1])]


def work(client: interpose.Client, number: int) -> dict[str, torch.Tensor]:
    """What client `number` does: every other one changes something."""
    model = client.model("llama")
    prompt = prompt_of(number)
    layer = number % 4
    if number % 2:
        with model.trace(prompt, max_tokens=6, temperature=0.0, ignore_eos=True) as tracer:
            model.model.layers[layer].mlp.output[:] = 0.1 * number
            hidden = model.model.layers[layer].output[0].save()
            logits = model.logits.output.save()
            result = tracer.result.save()
        saved = {"hidden": hidden, "logits": logits}
    else:
        with model.trace(prompt, max_tokens=6, temperature=0.0, ignore_eos=True) as tracer:
            result = tracer.result.save()
        saved = {}
    return {**saved, "tokens": torch.tensor(result.token_ids)}


def test_eight_clients_at_once(service: RunningService, checkpoints: dict[str, Path]) -> None:
    plain = [number for number in range(8) if number % 2 == 0]
    stock = stock_tokens(checkpoints["llama"], [prompt_of(number) for number in plain])
    clients = [interpose.connect(service.address, progress=False) for _ in range(8)]
    try:
        alone = [work(client, number) for number, client in enumerate(clients)]
        together: list[list[dict[str, torch.Tensor]]] = [[] for _ in clients]
        start = threading.Barrier(len(clients))

        def run(number: int) -> None:
            start.wait()
            for _ in range(3):
                together[number].append(work(clients[number], number))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for client in clients:
            client.close()
    for expected, results in zip(alone, together, strict=True):
        assert len(results) == 3
        for result in results:
            assert torch.equal(result["tokens"], expected["tokens"])
            for name in expected:
                torch.testing.assert_close(result[name], expected[name], atol=1e-4, rtol=1e-4)
    assert [alone[number]["tokens"].tolist() for number in plain] == stock


def at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """Return what `work` gives for each number, all begun together."""
    start = threading.Barrier(count)

    def run(number: int) -> object:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_thirty_two_clients_at_once(service: RunningService) -> None:
    """Each with a session of its own and one short trace; none is refused, and none starts a process."""
    before = {process.pid for process in service.processes("ray::Session")}

    def work(number: int) -> torch.Tensor:
        with interpose.connect(service.address, progress=False) as client:
            model = client.model("llama")
            with model.trace(WORDS[number % len(WORDS)], max_tokens=1):
                hidden = model.model.layers[0].output[0].save()
            return hidden

    assert all(isinstance(hidden, torch.Tensor) for hidden in at_once(32, work))
    assert {process.pid for process in service.processes("ray::Session")} == before


def test_two_hundred_clients_at_once(service: RunningService) -> None:
    """Each with a connection, a session and one short trace; all sessions are open at a time."""
    opened = threading.Barrier(200)

    def work(number: int) -> list[str]:
        with grpc.insecure_channel(service.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.InterposeStub(channel)
            session = stub.OpenSession(service_pb2.OpenSessionRequest(), timeout=120).session_id
            opened.wait()
            request = service_pb2.SubmitRequest(protocol=PROTOCOL, session_id=session, trace=trace(max_tokens=1))
            events = [event for event in stub.Submit(request, timeout=300) if event.WhichOneof("kind")]
            stub.CloseSession(service_pb2.CloseSessionRequest(session_id=session), timeout=120)
            return kinds(events)

    for got in at_once(200, work):
        assert "saves" in got and "failed" not in got and got[-1] == "done"
