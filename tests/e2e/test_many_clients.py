"""Eight clients at once, some with edits and some without: each gets what it gets alone, those without what stock vLLM gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch

import interpose
from tests.e2e.service import RunningService

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
