"""`model.scan`: a block on shapes, each what a trace of the prompt has there, and nothing generated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interpose
from tests.engine.conftest import Bench
from tests.engine.notebook import notebook

PROMPT = [5, 400, 17, 99, 256, 31, 8]


def layers(bench: Bench, model: Any) -> Any:
    return model.transformer.h if bench.arch == "gpt2" else model.model.layers


def form(value: Any) -> Any:
    """Shapes and types in the places of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return [form(item) for item in value]
    return {key: form(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_every_location_has_the_shape_that_it_has_in_a_trace(bench: Bench) -> None:
    """Inputs and outputs of all modules, in the prefill and in the next step, logits and samples."""
    model = notebook(bench.engine)
    ends = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    with model.scan(PROMPT, max_tokens=2) as tracer:
        scanned = tracer.cache(include_inputs=True)
    with model.trace(PROMPT, **ends) as tracer:
        traced = tracer.cache(include_inputs=True)
    assert scanned.keys() == traced.keys() and scanned.refused == traced.refused == {}
    for path in traced:
        for visit, expected in zip(scanned[path].visits, traced[path].visits, strict=True):
            assert form(visit.output) == form(expected.output), path
            assert form(visit.inputs) == form(expected.inputs), path
    some = scanned[f"{bench.block(1)}.mlp"].output[0]
    assert some.is_meta and some.shape[0] == len(PROMPT)


def test_views_applied_modules_and_the_blocks_own_computation(bench: Bench) -> None:
    model = notebook(bench.engine)
    vector = torch.ones(8)
    mlp = layers(bench, model)[1].mlp

    def both(context: Any) -> dict[str, Any]:
        with context:
            width = mlp.output.shape[-1]
            mlp.output[:] = 0
            mixed = (mlp.output[:, :8] + vector).sum(0).save()
            stream = model.blocks[1].resid_post
            lens = model.logits(model.final_norm(stream)).save()
            z = model.blocks[2].attn.z.save()
            layers_skipped = [width, stream.shape].save()
            own = torch.zeros(2).save()
        return {"mixed": mixed, "lens": lens, "z": z, "shapes": layers_skipped, "own": own}

    scanned = both(model.scan(PROMPT))
    traced = both(model.trace(PROMPT, temperature=0.0))
    assert {name: form(value) for name, value in scanned.items()} == {
        name: form(value) for name, value in traced.items()
    }
    assert scanned["lens"].is_meta and not scanned["own"].is_meta and scanned["shapes"][0] == traced["shapes"][0]


def test_nothing_is_generated_and_the_engine_goes_on_as_before(bench: Bench) -> None:
    """No request, no tokens, no cache touched: what runs afterwards is what it was."""
    model = notebook(bench.engine)
    before = bench.engine.plain(PROMPT, max_tokens=4).token_ids
    mlp = layers(bench, model)[1].mlp
    with model.scan(PROMPT, max_tokens=3) as tracer:
        steps = []
        for step in tracer.iter[:]:
            steps.append((step, mlp.output.shape[0]))
            mlp.output = mlp.output * 2
            if step == 1:
                mlp.output
        steps.save()
        result = tracer.result.save()
    assert steps == [(0, len(PROMPT)), (1, 1), (2, 1)]
    assert result.token_ids == [] and result.prompt_token_ids == PROMPT
    assert tracer.accounting.generated_tokens == 0 and tracer.accounting.prompt_tokens == len(PROMPT)
    assert not bench.engine.scheduler.requests and bench.engine.interleaver.idle
    assert bench.engine.plain(PROMPT, max_tokens=4).token_ids == before == bench.oracle.run(PROMPT, 4).tokens


def test_what_depends_on_elements_is_an_error(bench: Bench) -> None:
    model = notebook(bench.engine)
    mlp = layers(bench, model)[1].mlp
    wrong = {
        "masked": lambda h: h[h > 0],
        "item": lambda h: h.max().item(),
        "branch": lambda h: 1 if h[0, 0] > 0 else 2,
        "list": lambda h: h.tolist(),
        "nonzero": lambda h: torch.nonzero(h),
    }
    for name, compute in wrong.items():
        with pytest.raises(interpose.InvalidArgument, match="a scan has shapes and no elements") as caught:
            with model.scan(PROMPT):
                compute(mlp.output)
        assert caught.value.frames[0].text.strip() == "compute(mlp.output)", name


def test_errors_are_those_of_a_trace(bench: Bench) -> None:
    model = notebook(bench.engine)
    first, second = layers(bench, model)[0].mlp, layers(bench, model)[1].mlp
    with pytest.raises(interpose.OutOfOrder):
        with model.scan(PROMPT):
            second.output
            first.output
    with pytest.raises(interpose.InvalidArgument, match="was assigned a tensor of shape"):
        with model.scan(PROMPT):
            first.output = torch.zeros(1, 1)
    with pytest.raises(interpose.InvalidArgument, match="a scan has not"):
        with model.scan(PROMPT):
            model.blocks[0].attn.pattern
    with pytest.raises(interpose.InterventionError, match="ZeroDivisionError"):
        with model.scan(PROMPT):
            1 / 0
    assert bench.engine.interleaver.idle


def test_a_model_that_raises_leaves_nothing_of_the_scan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tokens: int) -> None:
        raise RuntimeError("no such kernel")

    model = notebook(bench.engine)
    mlp = layers(bench, model)[1].mlp
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.worker, "_dummy_pass", broken)
        with pytest.raises(interpose.InterposeError, match="no such kernel"):
            with model.scan(PROMPT):
                mlp.output
    assert bench.engine.interleaver.idle
    with model.scan(PROMPT):
        output = mlp.output.save()
    assert output.shape[0] == len(PROMPT)


def test_weights_have_their_shapes(bench: Bench) -> None:
    model = notebook(bench.engine)
    mlp = layers(bench, model)[1].mlp
    down = mlp.c_proj if bench.arch == "gpt2" else mlp.down_proj
    with model.scan(PROMPT):
        weight = down.weight.save()
        made = (down.input @ down.weight.T).save()
    with model.trace(PROMPT):
        expected = down.weight.save()
    assert weight.is_meta and form(weight) == form(expected)
    assert made.is_meta and list(made.shape) == [len(PROMPT), expected.shape[0]]
