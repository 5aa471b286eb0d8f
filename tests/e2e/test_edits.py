"""Standing edits on the whole service: in the requests that name them, on both ranks, and in no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import interpose
from interpose import InterventionError, NotFound

PROMPT = "The Eiffel Tower is in"


@pytest.fixture(autouse=True)
def _no_edits_left(model: interpose.Model) -> Iterator[None]:
    yield
    model.clear_edits()


def test_edits_run_in_the_requests_that_name_them(model: interpose.Model) -> None:
    vector = torch.linspace(-2, 2, 128).repeat(60, 1)[0]
    with model.edit("steer"):
        model.model.layers[1].mlp.output[:] += vector
    with model.edit("double"):
        model.model.layers[1].mlp.output[:] *= 2

    def run(*edits: str) -> tuple[torch.Tensor, torch.Tensor]:
        with model.trace(PROMPT, temperature=0.0, edits=edits):
            seen = model.model.layers[1].mlp.output.save()
            logits = model.logits.output.save()
        return seen, logits

    plain, plain_logits = run()
    both, both_logits = run("steer", "double")
    assert (both - (plain + vector) * 2).abs().max() < 1e-4
    other_way, _ = run("double", "steer")
    assert (other_way - (plain * 2 + vector)).abs().max() < 1e-4
    with model.trace(PROMPT, temperature=0.0):
        model.model.layers[1].mlp.output[:] = (model.model.layers[1].mlp.output + vector) * 2
        by_hand = model.logits.output.save()
    assert (by_hand - both_logits).abs().max() < 1e-4 < (by_hand - plain_logits).abs().max()
    assert (run()[1] - plain_logits).abs().max() < 1e-4


def test_plain_prompts_and_several_of_them(client: interpose.Client, model: interpose.Model) -> None:
    with model.edit("calm") as edit:
        for _step in edit.iter[:]:
            model.logits.output[:] = 0
            model.logits.output[:, 7] = 9
    results = []
    with model.trace(max_tokens=4, ignore_eos=True, temperature=0.0, edits="calm") as tracer:
        for prompt in ("one", "two words", "three of them"):
            with tracer.invoke(prompt) as one:
                pass
            results.append(one)
    assert [one.result.token_ids for one in results] == [[7] * 4] * 3
    with interpose.connect(client.address, progress=False) as other:
        again = other.model("llama")
        assert [edit.name for edit in again.edits()] == ["calm"]
        with again.trace("one", temperature=0.0, edits=["calm"]) as plain:
            pass
        assert plain.result.token_ids == [7]
        assert not other.model("gpt2").edits()
        assert again.edits()[0].clear()
    with pytest.raises(NotFound, match="there is no edit 'calm' of llama; there are none"):
        with model.trace("one", edits=["calm"]):
            pass


def test_an_edit_that_fails(model: interpose.Model) -> None:
    with model.edit("bad"):
        hidden = model.model.layers[0].output[0]
        hidden @ torch.zeros(3)
    with pytest.raises(InterventionError, match="in the edit 'bad': RuntimeError") as caught:
        with model.trace(PROMPT, edits=["bad"]):
            x = model.model.layers[3].output[0].save()
    assert caught.value.frames[-1].text.strip() == "hidden @ torch.zeros(3)"
    with model.trace(PROMPT, temperature=0.0):
        x = model.model.layers[3].output[0].save()
    assert x.shape[-1] == 128
