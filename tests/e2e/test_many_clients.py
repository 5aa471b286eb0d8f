"""Eight clients at once, some with edits and some without: each gets what it gets alone."""

from __future__ import annotations

import threading

import torch

import interpose
from tests.e2e.service import RunningService

WORDS = "the river runs through the city under the old bridges and past the museum".split()


def work(client: interpose.Client, number: int) -> dict[str, torch.Tensor]:
    """What client `number` does: every other one changes something."""
    model = client.model("llama")
    prompt = " ".join(WORDS[: 3 + number])
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


def test_eight_clients_at_once(service: RunningService) -> None:
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
