"""Invokes that run in the same steps over two tensor-parallel ranks: barriers, and blocks that see the rows of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import interpose
from tests.oracle import Edit, Oracle, difference

CLEAN = [5, 400, 17, 99, 256, 31, 8]
OTHER = [3, 77, 410, 8]
TOLERANCE = 1e-4


@pytest.fixture(params=["llama", "gpt2"])
def served(
    client: interpose.Client, checkpoints: dict[str, Path], request: pytest.FixtureRequest
) -> tuple[Any, Oracle]:
    return client.model(request.param), Oracle(checkpoints[request.param])


def layers_of(model: Any, oracle: Oracle) -> Any:
    return model.transformer.h if hasattr(oracle.model, "transformer") else model.model.layers


def patched(row: Any) -> Any:
    def apply(value: Any) -> Any:
        value[0][-1] = row
        return value

    return apply


def test_patching_a_sharded_value_at_the_same_module(served: tuple[Any, Oracle]) -> None:
    """What a column-parallel layer made of one prompt goes into the same layer's output for another, both ranks agreeing."""
    model, oracle = served
    layer = layers_of(model, oracle)[1]
    column = layer.attn.c_attn if hasattr(oracle.model, "transformer") else layer.self_attn.qkv_proj
    logits = []
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN):
            for _step in tracer.iter[:]:
                clean = column.output[0]
                barrier()
        with tracer.invoke(OTHER):
            for _step in tracer.iter[:]:
                barrier()
                column.output[0][-1] = clean[-1]
                logits.append(model.logits.output.save())
    truth = oracle.run(CLEAN, 3)
    edits = [
        Edit(column.path, "output", patched(truth.value(column.path, "output", step)[0][-1]), steps={step})
        for step in range(3)
    ]
    expected = oracle.run(OTHER, 3, edits)
    for found, logit in zip(logits, expected.logits, strict=True):
        assert difference(found, logit) <= TOLERANCE
    assert difference(expected.logits[0], oracle.run(OTHER).logits[0]) > 1e-3


def test_who_waits_for_nobody_gets_an_error_at_its_line(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    with pytest.raises(interpose.InvalidArgument, match="0 more could come") as caught:
        with model.trace(temperature=0.0, max_tokens=200, ignore_eos=True) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(CLEAN):
                barrier()
            with tracer.invoke(OTHER, max_tokens=2):
                shape = mlp.output.shape.save()
                if shape[0] == 0:
                    barrier()
    assert caught.value.frames[-1].text.strip() == "barrier()"
    assert shape[0] == len(OTHER)


def test_more_than_a_step_has_room_for(model: Any) -> None:
    with pytest.raises(interpose.InvalidArgument, match="tokens of their prompts together, and the engine runs up to"):
        with model.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            for _ in range(60):
                with tracer.invoke([7] * (model.max_model_len - 1)):
                    barrier()


def test_companions_of_one_that_reads_what_failed_do_not_run(model: Any) -> None:
    with pytest.raises(interpose.InterventionError, match="ZeroDivisionError"):
        with model.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke([3]):
                scale = 1 / 0
            with tracer.invoke(CLEAN):
                barrier()
                ran = 1
                interpose.save(ran)
            with tracer.invoke(OTHER):
                barrier()
                print(scale)
    with pytest.raises(NameError):
        ran


def test_rows_of_all_prompts(served: tuple[Any, Oracle]) -> None:
    """A sharded value of both prompts is whole, and what is written to it reaches both; one goes on alone in the end."""
    model, oracle = served
    layer = layers_of(model, oracle)[1]
    column = layer.attn.c_attn if hasattr(oracle.model, "transformer") else layer.self_attn.qkv_proj
    logits: list[Any] = []
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        before = [].save()
        with tracer.invoke(CLEAN, max_tokens=3):
            pass
        with tracer.invoke(OTHER, max_tokens=2):
            pass
        with tracer.invoke():
            for _step in tracer.iter[:]:
                before.append(column.output[0].clone())
                column.output[0][:, ::3] = 0.5
                logits.append(model.logits.output.save())
            results = tracer.result.save()
    edit = Edit(column.path, "output", whole_row)
    truths = [oracle.run(CLEAN, 3, [edit]), oracle.run(OTHER, 2, [edit])]
    given = [oracle.run(prompt).value(column.path)[0] for prompt in (CLEAN, OTHER)]
    assert difference(before[0], torch.cat(given)) <= TOLERANCE
    assert [rows.shape[0] for rows in before[1:]] == [2, 1]
    for step, found in enumerate(logits):
        still = [truth.logits[step] for truth in truths if step < len(truth.logits)]
        assert difference(found, torch.cat(still)) <= TOLERANCE
    assert [one.token_ids for one in results] == [truth.tokens for truth in truths]


def whole_row(value: Any) -> Any:
    value[0][:, ::3] = 0.5
    return value
