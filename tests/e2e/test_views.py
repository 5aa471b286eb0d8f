"""Canonical views over gRPC, Serve and two tensor-parallel workers: whole, writable by head, equal to transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose
from tests.e2e.service import RunningService
from tests.oracle import Edit, Oracle, difference, locations

PROMPTS = [[5, 400, 17, 99, 256, 31, 8], [3, 77], [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19], [222]]
STEPS = 5
TOLERANCE = 1e-4


class Canonical:
    """A model of the service and the truth about its canonical values."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name = name
        self.oracle = Oracle(checkpoint, canonical=True)
        paths = [at.path for at in locations(checkpoint, canonical=True) if at.path.startswith("blocks")]
        self.names = [tuple(path.split(".")[1:]) for path in paths]


@pytest.fixture(scope="module")
def canonical(checkpoints: dict[str, Path]) -> dict[str, Canonical]:
    return {name: Canonical(name, checkpoint) for name, checkpoint in checkpoints.items()}


@pytest.fixture(params=["llama", "gpt2"])
def truth(canonical: dict[str, Canonical], request: pytest.FixtureRequest) -> Canonical:
    return canonical[request.param]


def read_everything(model: Any, names: list[tuple[str, ...]], prompt: list[int]) -> tuple[dict[Any, Any], list[int]]:
    with model.trace(prompt, max_tokens=STEPS, ignore_eos=True, temperature=0.0) as tracer:
        values = {}
        for step in tracer.iter[:]:
            values["embed", "output", step] = model.embed.output
            for layer, *rest in names:
                place = model.blocks[int(layer)]
                for name in rest[:-1]:
                    place = getattr(place, name)
                values[(layer, *rest, step)] = getattr(place, rest[-1])
            values["final_norm", "input", step] = model.final_norm.input
            values["final_norm", "output", step] = model.final_norm.output
            values["unembed", "output", step] = model.unembed.output
        values = values.save()
        tokens = tracer.result.token_ids.save()
    return values, tokens


def check_everything(truth: Canonical, prompt: list[int], values: dict[Any, Any], tokens: list[int]) -> None:
    reference = truth.oracle.run(prompt, STEPS)
    assert tokens == reference.tokens
    assert len(values) == (len(truth.names) + 4) * STEPS
    for (*names, step), value in values.items():
        if names[0] == "unembed":
            expected = reference.logits[step]
        else:
            expected = reference.value(
                ".".join(names if names[0].isalpha() or "_" in names[0] else ["blocks", *names]), step=step
            )
        error = difference(value, expected)
        assert error <= TOLERANCE, f"{names} in step {step} is off by {error}"


def test_every_view_in_prefill_and_decode(client: interpose.Client, truth: Canonical) -> None:
    for prompt in PROMPTS[:3]:
        check_everything(truth, prompt, *read_everything(client.model(truth.name), truth.names, prompt))


def test_eight_clients_read_everything_at_once(service: RunningService, truth: Canonical) -> None:
    prompts = [*PROMPTS, [9, 9, 9], [100, 200, 300, 400], [44, 1, 7], [350, 20, 6, 5, 4, 3]]

    def traced(prompt: list[int]) -> tuple[dict[Any, Any], list[int]]:
        with interpose.connect(service.address, progress=False) as client:
            return read_everything(client.model(truth.name), truth.names, prompt)

    with ThreadPoolExecutor(len(prompts)) as pool:
        results = [pool.submit(traced, prompt) for prompt in prompts]
        for prompt, result in zip(prompts, results, strict=True):
            check_everything(truth, prompt, *result.result())


@pytest.mark.parametrize("kind", ["stream", "middle", "heads", "keys", "values", "act"])
def test_a_change_does_what_it_does_in_transformers(client: interpose.Client, truth: Canonical, kind: str) -> None:
    model = client.model(truth.name)
    vector = torch.linspace(-1, 1, truth.oracle.config.hidden_size)
    logits = []
    with model.trace(PROMPTS[0], max_tokens=4, ignore_eos=True, temperature=0.0) as tracer:
        for _step in tracer.iter[:]:
            block = model.blocks[1]
            if kind == "stream":
                block.resid_post += vector
            elif kind == "middle":
                block.resid_mid[-1] = 2.0
            elif kind == "heads":
                block.attn.z[:, 3] = 0
            elif kind == "keys":
                block.attn.k[:, -1] = 0.5
            elif kind == "values":
                block.attn.v = block.attn.v.flip(-1)
            else:
                block.mlp.act[:, ::2] = 0
            logits.append(model.logits.output.save())

    def changed(index: Any, new: float) -> Any:
        def apply(value: torch.Tensor) -> torch.Tensor:
            value[index] = new
            return value

        return apply

    edits = {
        "stream": Edit("blocks.1.resid_post", "output", lambda value: value + vector),
        "middle": Edit("blocks.1.resid_mid", "output", changed(-1, 2.0)),
        "heads": Edit("blocks.1.attn.z", "output", changed((slice(None), 3), 0.0)),
        "keys": Edit("blocks.1.attn.k", "output", changed((slice(None), -1), 0.5)),
        "values": Edit("blocks.1.attn.v", "output", lambda value: value.flip(-1)),
        "act": Edit("blocks.1.mlp.act", "output", changed((slice(None), slice(None, None, 2)), 0.0)),
    }
    reference = truth.oracle.run(PROMPTS[0], 4, [edits[kind]])
    assert difference(reference.logits[0], truth.oracle.run(PROMPTS[0]).logits[0]) > 1e-3, "the change must show"
    for step, value in enumerate(logits):
        assert difference(value, reference.logits[step]) <= TOLERANCE


def test_what_a_model_does_not_have_is_refused_in_the_notebook(client: interpose.Client) -> None:
    model = client.model("gpt2")
    assert "(gate): refused: " in repr(model.blocks)
    with pytest.raises(interpose.UnknownLocation, match="has no gate"):
        with model.trace(PROMPTS[0]):
            model.blocks[0].mlp.gate.save()


def test_the_table_of_models_says_what_each_model_serves(client: interpose.Client) -> None:
    rows = {row["model"]: row for row in client.models()}
    gpt2: Any = rows["gpt2"]
    assert gpt2["layers"] == len(client.model("gpt2").blocks)
    assert "blocks[i].attn.q" in gpt2["views"] and "blocks[i].mlp.gate" not in gpt2["views"]
    verdict = client.model("gpt2").serves("blocks[0].mlp.gate")
    assert not verdict and gpt2["refused"]["blocks[i].mlp.gate"] == verdict.reason
    assert client.model("llama").serves("blocks[0].mlp.gate")
