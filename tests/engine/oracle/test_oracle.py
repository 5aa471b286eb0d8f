"""The oracle against transformers itself: its tokens, its sums, and what its edits do."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import Edit, Oracle, difference, locations
from tests.oracle.checkpoints import ARCHITECTURES, LAYERS, make_checkpoint

PROMPT = [5, 400, 17, 99, 256, 31, 8]
STEPS = 4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def block_path(oracle: Oracle, layer: int) -> str:
    return f"transformer.h.{layer}" if oracle.config.model_type == "gpt2" else f"model.layers.{layer}"


def stream_after(value: Any) -> torch.Tensor:
    """Return the residual stream after a block: a gpt2 block's output, or the sum of a llama block's pair."""
    return value[0] + value[1] if isinstance(value, tuple) else value


def changed(value: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tuple(v if v is None else by(v) for v in value) if isinstance(value, tuple) else by(value)


def test_tokens_equal_generate(oracle: Oracle) -> None:
    made = oracle.model.generate(torch.tensor([PROMPT]), max_new_tokens=STEPS, do_sample=False)[
        0, len(PROMPT) :
    ].tolist()
    assert made == oracle.run(PROMPT, STEPS).tokens[: len(made)]


def test_hidden_states_equal_transformers_own(oracle: Oracle) -> None:
    truth = oracle.run(PROMPT)
    with torch.no_grad():
        own = oracle.model(torch.tensor([PROMPT]), output_hidden_states=True)
    # hidden_states[i + 1] is after block i, except that the last one is after the final norm.
    for layer in range(LAYERS - 1):
        stream = stream_after(truth.value(block_path(oracle, layer)))
        assert torch.equal(stream, own.hidden_states[layer + 1][0])
    assert difference(truth.logits[0], own.logits[0, -1:]) < 1e-5


def test_every_location_has_a_value_in_every_step(oracle: Oracle, checkpoint: Path) -> None:
    truth = oracle.run(PROMPT, STEPS)
    listed = locations(checkpoint)
    assert len(set(listed)) == len(listed)
    assert {(at.path, at.kind, step) for at in listed for step in range(STEPS)} == set(truth.values)
    for (path, _, step), value in truth.values.items():
        tensor = value[0] if isinstance(value, tuple) else value
        assert tensor.shape[0] == (len(PROMPT) if step == 0 and path != "logits" else 1), path


def test_steps_equal_one_prefill_of_everything(oracle: Oracle) -> None:
    stepwise = oracle.run(PROMPT, STEPS)
    at_once = oracle.run(PROMPT + stepwise.tokens[:-1])
    for path, kind, step in stepwise.values:
        if step == 0 or path == "logits":
            continue
        row = len(PROMPT) + step - 1
        expected = changed(at_once.value(path, kind), itemgetter(slice(row, row + 1)))
        assert difference(stepwise.value(path, kind, step), expected) < 1e-4, (path, kind, step)


def test_an_edit_that_returns_its_value_changes_nothing(oracle: Oracle, checkpoint: Path) -> None:
    plain = oracle.run(PROMPT, STEPS)
    same = oracle.run(PROMPT, STEPS, [Edit(at.path, at.kind, lambda value: value) for at in locations(checkpoint)])
    assert same.tokens == plain.tokens
    for key, value in plain.values.items():
        # A pair that is put together again is added in the same order, so nothing at all may differ.
        assert difference(same.values[key], value) == 0.0, key


def test_zeroing_a_block_equals_a_plain_hook(oracle: Oracle) -> None:
    blocks = oracle.model.transformer.h if oracle.config.model_type == "gpt2" else oracle.model.model.layers
    handle = blocks[1].register_forward_hook(lambda module, args, output: output * 0)
    try:
        with torch.no_grad():
            expected = oracle.model(torch.tensor([PROMPT])).logits[0, -1:]
    finally:
        handle.remove()
    edited = oracle.run(PROMPT, edits=[Edit(block_path(oracle, 1), "output", lambda v: changed(v, torch.zeros_like))])
    assert difference(edited.logits[0], expected) < 1e-5
    assert difference(edited.logits[0], oracle.run(PROMPT).logits[0]) > 1e-2


def test_an_edit_reaches_later_steps_through_the_cache(oracle: Oracle) -> None:
    plain = oracle.run(PROMPT, STEPS)
    edit = Edit(block_path(oracle, 0), "output", lambda value: changed(value, lambda v: v * 2 + 0.1), steps={0})
    edited = oracle.run(PROMPT, STEPS, [edit], force=plain.tokens)
    assert edited.tokens == plain.tokens
    # The same token goes in and the first block is left alone in step 2, so only the cache can make a difference.
    assert difference(edited.value(block_path(oracle, 0), step=2), plain.value(block_path(oracle, 0), step=2)) == 0.0
    assert difference(edited.logits[2], plain.logits[2]) > 1e-3


def test_a_patched_stream_carries_the_other_prompt(oracle: Oracle) -> None:
    other = oracle.run([7, 7, 300, 2, 11, 64, 90])
    last = block_path(oracle, LAYERS - 1)
    patched = oracle.run(PROMPT, edits=[Edit(last, "output", lambda value: other.value(last))])
    assert difference(patched.logits[0], other.logits[0]) < 1e-5


def test_a_norms_sum_is_the_stream(oracle: Oracle) -> None:
    if oracle.config.model_type == "gpt2":
        norm, before = "transformer.h.1.ln_1", "transformer.h.0"
        truth = oracle.run(PROMPT)
        assert torch.equal(truth.value(norm, "input"), truth.value(before))
        return
    truth = oracle.run(PROMPT)
    _, total = truth.value("model.layers.1.input_layernorm")
    assert torch.equal(total, stream_after(truth.value("model.layers.0")))
    assert torch.equal(truth.value("model.layers.1.input_layernorm", "input"), truth.value("model.layers.0.mlp"))
    zero_sum = Edit("model.layers.1.input_layernorm", "output", lambda value: (value[0], value[1] * 0))
    edited = oracle.run(PROMPT, edits=[zero_sum])
    added, total = edited.value("model.layers.1.post_attention_layernorm", "input"), edited.value("model.layers.1")[1]
    assert torch.equal(added, total)


def test_an_edit_in_place_reaches_the_residual_connection(oracle: Oracle) -> None:
    gpt2 = oracle.config.model_type == "gpt2"
    norm, block = ("transformer.h.0.ln_1" if gpt2 else "model.layers.0.input_layernorm"), block_path(oracle, 0)

    def stream(in_place: bool) -> torch.Tensor:
        truth = oracle.run(PROMPT, edits=[Edit(norm, "input", lambda value: value + 1, in_place=in_place)])
        return stream_after(truth.value(block))

    # The norm sees the same in both; the rest is the one that was added to the stream, and what it does to the MLP.
    assert difference(stream(in_place=True), stream(in_place=False)) > 0.5


def test_an_edit_that_cannot_be_made_is_refused(oracle: Oracle) -> None:
    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in oracle.model.modules())

    before = hooks()
    path = f"{block_path(oracle, 0)}.mlp"
    with pytest.raises(ValueError, match="made"):
        oracle.run(PROMPT, edits=[Edit(path, "output", lambda value: value[:1])])
    with pytest.raises(ValueError, match="did not reach"):
        oracle.run(PROMPT, edits=[Edit(f"{path}.nothing", "output", lambda value: value)])
    with pytest.raises(ValueError, match="did not reach"):
        oracle.run(PROMPT, edits=[Edit(path, "output", lambda value: value, steps={3})])
    assert hooks() == before
