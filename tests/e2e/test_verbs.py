"""What `interpose.verbs` takes and gives beyond the examples' commands: lenses of Jacobians, several prompts, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import interpose
from interpose import verbs

PROMPTS = ["The Eiffel Tower is in", "The capital of Japan is"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Path]) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoints["llama"], dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def prompts(checkpoints: dict[str, Path]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["llama"])
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def streams(llama: Any, ids: list[int]) -> list[torch.Tensor]:
    """The residual stream after each layer, [tokens, hidden] each; the last one is not normalised."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, args, output: found.append(output[0].detach().clone()))
        for layer in llama.model.layers
    ]
    with torch.no_grad():
        llama(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return found


def test_a_jacobian_lens_is_fitted_and_applied(model: interpose.Model, llama: Any, prompts: list[list[int]]) -> None:
    ids, layers = prompts[0], [1, 3]
    matrices = verbs.fit_jacobian_lens(llama, [ids[:3]], layers=layers)
    start = streams(llama, ids[:3])[1]
    rotary = llama.model.rotary_emb(start[None], torch.arange(3)[None])

    def rest(stream: torch.Tensor) -> torch.Tensor:
        hidden = stream[None]
        mask = torch.full((3, 3), -torch.inf).triu(1)[None, None]
        for layer in llama.model.layers[2:]:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        return hidden[0].sum(0)

    jacobian = torch.autograd.functional.jacobian(rest, start).sum(1) / 6  # [hidden, hidden], of 6 pairs of tokens
    np.testing.assert_allclose(matrices[1], jacobian.numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(matrices[3], np.eye(len(jacobian)) / 2, atol=TOLERANCE)

    found = verbs.jacobian_lens(model, PROMPTS[0], matrices)
    assert found.layers == (1, 3)
    for row, layer in enumerate(layers):
        with torch.no_grad():
            stream = streams(llama, ids)[layer] @ torch.from_numpy(matrices[layer]).T
            top = llama.lm_head(llama.model.norm(stream)).softmax(-1).max(-1)
        assert found.ids[row].tolist() == top.indices.tolist()
        np.testing.assert_allclose(found.probabilities[row], top.values.numpy(), atol=TOLERANCE)


def test_several_prompts_give_what_each_gives_alone(model: interpose.Model) -> None:
    both = verbs.attribution(model, PROMPTS)
    alone = [verbs.attribution(model, prompt) for prompt in PROMPTS]
    np.testing.assert_allclose(both.shares, np.concatenate([one.shares for one in alone]), atol=TOLERANCE)
    assert both.answers == (*alone[0].answers, *alone[1].answers)
    direction = verbs.difference_of_means(model, PROMPTS[:1], PROMPTS[1:], layer=1)
    steered = verbs.steer(model, PROMPTS, direction, layer=1, strengths=[0.0, 1.0], max_tokens=2)
    one = verbs.steer(model, PROMPTS[1], direction, layer=1, strengths=[0.0, 1.0], max_tokens=2)
    np.testing.assert_allclose(steered.logits[:, 1], one.logits[:, 0], atol=10 * TOLERANCE)


def test_a_probe_scores_new_prompts(model: interpose.Model, llama: Any, prompts: list[list[int]]) -> None:
    texts = [*PROMPTS, "One, two, three,", "The water is cold and"]
    probe = verbs.probe(model, texts, [True, False, True, False], layers=[0, 2], folds=2)
    assert probe.activations.shape == (2, 4, 128) and probe.classes == (False, True)
    np.testing.assert_allclose(probe.activations[1, 0], streams(llama, prompts[0])[2][-1].numpy(), atol=TOLERANCE)
    scores = probe.apply(model, PROMPTS, layer=2)
    for ids, found in zip(prompts, scores.scores, strict=True):
        truth = streams(llama, ids)[2].numpy() @ probe.weights[1, :-1] + probe.weights[1, -1]
        np.testing.assert_allclose(found, truth, atol=10 * TOLERANCE)
    assert scores.scores[0][-1] > 0 > scores.scores[1][-1]
    with pytest.raises(interpose.InvalidArgument, match="layer 1 has no probe"):
        probe.apply(model, PROMPTS, layer=1)


def test_the_threshold_of_a_dictionary_keeps_features_off(
    model: interpose.Model, llama: Any, prompts: list[list[int]]
) -> None:
    weights = {"W_enc": np.eye(128), "b_enc": np.zeros(128), "W_dec": np.eye(128), "b_dec": np.full(128, 0.1)}
    weights["threshold"] = np.full(128, 0.5)
    found = verbs.sae(model, PROMPTS[0], weights, layer=1)
    raw = streams(llama, prompts[0])[1].numpy() - 0.1
    np.testing.assert_allclose(found.activations, np.where(raw > 0.5, raw, 0), atol=TOLERANCE)
    assert (raw > 0).sum() > (raw > 0.5).sum() > 0


def test_what_makes_no_experiment_is_refused(model: interpose.Model) -> None:
    with pytest.raises(interpose.InvalidArgument, match="same number of tokens") as refused:
        verbs.patch_sweep(model, "The river", "The river runs through the city")
    assert "4 tokens: ['<|bos|>'" in str(refused.value)
    with pytest.raises(interpose.InvalidArgument, match="layer=9: the model has 4 layers"):
        verbs.monitor(model, PROMPTS[0], np.ones(128), layer=9)
    with pytest.raises(interpose.InvalidArgument, match="vector of finite numbers"):
        verbs.steer(model, PROMPTS[0], np.ones((2, 128)))
    with pytest.raises(interpose.InvalidArgument, match="another kind of dictionary"):
        verbs.sae(model, PROMPTS[0], {"W_enc": np.eye(128), "W_dec": np.eye(128), "W_gate": np.eye(128)})
    with pytest.raises(interpose.InvalidArgument, match="2 matrices and 4 layers"):
        verbs.jacobian_lens(model, PROMPTS[0], [np.eye(128), np.eye(128)])
    with pytest.raises(interpose.InvalidArgument, match="two labels apart"):
        verbs.probe(model, PROMPTS, [1, 1])
