"""Skipped modules and uncounted writes over two tensor-parallel ranks equal the same edits in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import interpose
from tests.oracle import Edit, Oracle, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
STEPS = 3
TOLERANCE = 1e-4


def whole_row(value: Any) -> Any:
    value[0][:, ::3] = 0.5
    return value


@pytest.fixture(params=["llama", "gpt2"])
def served(
    client: interpose.Client, checkpoints: dict[str, Path], request: pytest.FixtureRequest
) -> tuple[Any, Oracle]:
    return client.model(request.param), Oracle(checkpoints[request.param])


def test_attention_and_mlp_skipped_in_every_step(served: tuple[Any, Oracle]) -> None:
    model, oracle = served
    gpt2 = hasattr(oracle.model, "transformer")
    layers = model.transformer.h if gpt2 else model.model.layers
    attention, mlp, first = layers[1].attn if gpt2 else layers[1].self_attn, layers[2].mlp, layers[0]
    logits = []
    with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT):
            for _step in tracer.iter[:]:
                x = first.output if gpt2 else first.output[0]
                attention.skip(torch.full_like(x, 0.25))
                mlp.skip(x)
                logits.append(model.logits.output.save())
        with tracer.invoke([3, 77], max_tokens=1):
            beside = model.logits.output.save()
    assert difference(beside, oracle.run([3, 77]).logits[0]) <= TOLERANCE
    kept: list[Any] = []

    def keep(value: Any) -> Any:
        kept.append(value if gpt2 else value[0])
        return value

    edits = [
        Edit(first.path, "output", keep),
        Edit(attention.path, "output", lambda value: value * 0 + 0.25),
        Edit(mlp.path, "output", lambda value: kept[-1]),
    ]
    truth = oracle.run(PROMPT, STEPS, edits)
    for value, expected in zip(logits, truth.logits, strict=True):
        assert difference(value, expected) <= TOLERANCE


def test_attention_that_runs_after_it_was_skipped_is_refused(served: tuple[Any, Oracle]) -> None:
    model, oracle = served
    gpt2 = hasattr(oracle.model, "transformer")
    layers = model.transformer.h if gpt2 else model.model.layers
    attention, first = layers[1].attn if gpt2 else layers[1].self_attn, layers[0]
    with pytest.raises(interpose.InvalidArgument, match="was skipped from step 0 on"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True):
            x = first.output if gpt2 else first.output[0]
            attention.skip(x)


def test_uncounted_writes_to_a_sharded_value(served: tuple[Any, Oracle]) -> None:
    model, oracle = served
    gpt2 = hasattr(oracle.model, "transformer")
    layers = model.transformer.h if gpt2 else model.model.layers
    column = layers[1].attn.c_attn if gpt2 else layers[1].self_attn.qkv_proj
    with model.trace(PROMPT, temperature=0.0):
        column.output[0].numpy()[:, ::3] = 0.5
        logits = model.logits.output.save()
    truth = oracle.run(PROMPT, 1, [Edit(column.path, "output", whole_row)])
    assert difference(logits, truth.logits[0]) <= TOLERANCE
    assert difference(truth.logits[0], oracle.run(PROMPT).logits[0]) > 1e-3
