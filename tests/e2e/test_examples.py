"""The experiments of the field, as `examples/` shows them: the same numbers as the same experiment in transformers.

Here each experiment is written a second time, with plain hooks on a transformers model, by someone who has only that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import interpose
from tests.e2e.service import RunningService

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-4

Hook = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.fixture
def example(
    request: pytest.FixtureRequest, service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """The example that a test is named after, and what it found: the whole command, with its picture."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    experiment = importlib.import_module("experiment")
    module = importlib.import_module(request.function.__name__.removeprefix("test_"))
    results = []

    def run(model: interpose.Model) -> Any:
        results.append(module.run(model))
        return results[0]

    draw = getattr(module, "draw", experiment.plot)

    picture = tmp_path / "picture.png"
    arguments = ["--address", service.address, "--model", "llama", "--picture", str(picture)]
    experiment.main(module.__doc__, run, "unused.png", argv=arguments, draw=draw)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    return module, results[0]


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        checkpoints["llama"], dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(checkpoints["llama"])


@contextmanager
def hooked(module: torch.nn.Module, hook: Hook, *, before: bool = False) -> Iterator[None]:
    """Put a function of [tokens, width] on a module's output, or on its first input."""

    def after_forward(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        changed = hook(output[0])
        return None if changed is None else changed[None]

    def before_forward(_: Any, args: Any) -> Any:
        changed = hook(args[0][0])
        return None if changed is None else (changed[None], *args[1:])

    register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(before_forward if before else after_forward)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def logits(llama: Any, ids: list[int]) -> torch.Tensor:
    """What the next token is chosen from, [vocab]."""
    return llama(torch.tensor([ids])).logits[0, -1]


@torch.no_grad()
def streams(llama: Any, ids: list[int]) -> list[torch.Tensor]:
    """The residual stream after each layer, [tokens, hidden] each; the last one is not normalised."""
    found: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _, args, output: found.append(output[0].clone()))
        for layer in llama.model.layers
    ]
    llama(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


def test_logit_lens(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    lens, found = example
    ids = tokenizer.encode(lens.PROMPT)
    with torch.no_grad():
        for layer, stream in enumerate(streams(llama, ids)):
            top = llama.lm_head(llama.model.norm(stream)).softmax(-1).max(-1)
            assert found.ids[layer].tolist() == top.indices.tolist()
            np.testing.assert_allclose(found.probabilities[layer], top.values.numpy(), atol=TOLERANCE)
            last = llama.lm_head(llama.model.norm(stream))[-1]
            assert found.ranks[layer] == int((last > last[found.answer]).sum()) + 1
            assert found.climb[layer] == pytest.approx(float(last.softmax(-1)[found.answer]), abs=TOLERANCE)
    assert found.answer == int(logits(llama, ids).argmax())
    assert found.ranks[-1] == 1


def test_activation_patching(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    patching, found = example
    assert found.clean == tokenizer.encode(patching.CLEAN)
    assert found.corrupted == tokenizer.encode(patching.CORRUPTED)
    assert len(found.clean) == len(found.corrupted)

    clean, corrupted = logits(llama, found.clean), logits(llama, found.corrupted)
    first, second = int(clean.argmax()), int(corrupted.argmax())
    assert found.answers == (first, second)
    assert first != second
    kept = streams(llama, found.clean)
    lowest, span = (
        corrupted[first] - corrupted[second],
        clean[first] - clean[second] - corrupted[first] + corrupted[second],
    )
    truth = torch.zeros(len(kept), len(found.clean))
    for layer, position in np.ndindex(*truth.shape):

        def patch(stream: torch.Tensor, layer: int = layer, position: int = position) -> torch.Tensor:
            stream[position] = kept[layer][position]
            return stream

        with hooked(llama.model.layers[layer], patch):
            patched = logits(llama, found.corrupted)
        truth[layer, position] = (patched[first] - patched[second] - lowest) / span
    np.testing.assert_allclose(found.share, truth.numpy(), atol=10 * TOLERANCE)
    assert found.share[-1, -1] == pytest.approx(1.0, abs=1e-3)
    shared = next(at for at, (one, other) in enumerate(zip(found.clean, found.corrupted, strict=True)) if one != other)
    assert shared >= 3 and not found.share[:, :shared].any(), "no run patches what both prompts begin with"


def test_steering(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    steering, found = example
    means = [
        torch.stack([streams(llama, tokenizer.encode(prompt))[found.layer][-1] for prompt in prompts]).mean(0)
        for prompts in (steering.TOWARDS, steering.AWAY)
    ]
    direction = means[0] - means[1]
    np.testing.assert_allclose(found.direction, direction.numpy(), atol=TOLERANCE)
    prompt = tokenizer.encode(steering.PROMPT)
    for row, strength in enumerate(steering.STRENGTHS):
        with hooked(llama.model.layers[found.layer], lambda stream, strength=strength: stream + strength * direction):
            first = logits(llama, prompt)
            last = streams(llama, prompt)[-1][-1]
            with torch.no_grad():
                ids = llama.generate(
                    torch.tensor([prompt]), max_new_tokens=steering.STEPS, do_sample=False, eos_token_id=None
                )[0]
        np.testing.assert_allclose(found.logits[row, 0], first.numpy(), atol=10 * TOLERANCE)
        projection = float(last @ direction / direction.norm())
        assert found.projections[row, 0] == pytest.approx(projection, abs=10 * TOLERANCE)
        assert found.texts[row][0] == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    assert len(set(found.texts)) > 2


def test_head_ablation(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    ablation, found = example
    ids = tokenizer.encode(ablation.PROMPT)
    whole = logits(llama, ids).log_softmax(-1)
    assert found.answers == (int(whole.argmax()),)
    config = llama.config
    assert found.change.shape == (1, config.num_hidden_layers, config.num_attention_heads)
    width = config.head_dim
    for layer, head in np.ndindex(*found.change.shape[1:]):

        def ablate(z: torch.Tensor, head: int = head) -> torch.Tensor:
            z = z.clone()
            z[:, head * width : (head + 1) * width] = 0
            return z

        with hooked(llama.model.layers[layer].self_attn.o_proj, ablate, before=True):
            change = logits(llama, ids).log_softmax(-1)[found.answers[0]] - whole[found.answers[0]]
        assert found.change[0, layer, head] == pytest.approx(float(change), abs=10 * TOLERANCE)


def test_attribution(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    attribution, found = example
    ids = tokenizer.encode(attribution.PROMPT)
    first, second = logits(llama, ids).topk(2).indices.tolist()
    assert found.answers == ((first, second),)
    terms: list[torch.Tensor] = []
    handles = []
    for layer in llama.model.layers:
        for part in (layer.self_attn, layer.mlp):
            handles.append(
                part.register_forward_hook(
                    lambda _, args, output: terms.append((output[0] if isinstance(output, tuple) else output)[0, -1])
                )
            )
    final = logits(llama, ids)
    for handle in handles:
        handle.remove()
    terms.insert(0, llama.model.embed_tokens.weight[ids[-1]].detach())
    scale = llama.model.norm.weight.detach() / torch.stack(terms).sum(0).pow(2).mean().add(config_epsilon(llama)).sqrt()
    direction = (llama.lm_head.weight[first] - llama.lm_head.weight[second]).detach()
    truth = [float((term * scale) @ direction) for term in terms]
    np.testing.assert_allclose(found.shares, [[*truth, 0.0]], atol=10 * TOLERANCE)  # no biases at the end
    assert found.difference[0] == pytest.approx(float(final[first] - final[second]), abs=10 * TOLERANCE)
    assert found.shares.sum() == pytest.approx(found.difference[0], abs=10 * TOLERANCE)


def config_epsilon(llama: Any) -> float:
    return float(llama.config.rms_norm_eps)


def test_attention(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    attention, found = example
    assert found.ids == tokenizer.encode(attention.PROMPT)
    with torch.no_grad():
        truth = llama(torch.tensor([found.ids]), output_attentions=True).attentions
    np.testing.assert_allclose(found.patterns, np.stack([one[0].numpy() for one in truth]), atol=TOLERANCE)


def test_sae(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    sae, found = example
    assert found.ids == tokenizer.encode(sae.PROMPT)
    weights = {name: torch.from_numpy(array) for name, array in sae.dictionary(llama.config.hidden_size).items()}
    encoder, encoder_bias, decoder, decoder_bias = (weights[name] for name in ("W_enc", "b_enc", "W_dec", "b_dec"))
    stream = streams(llama, found.ids)[found.layer]
    features = torch.relu((stream - decoder_bias) @ encoder + encoder_bias)
    np.testing.assert_allclose(found.activations, features.numpy(), atol=TOLERANCE)
    strongest = int(features[-1].argmax())
    assert found.feature == strongest

    def without(stream: torch.Tensor) -> torch.Tensor:
        return stream - features[:, strongest, None] * decoder[strongest]

    with hooked(llama.model.layers[found.layer], without):
        change = logits(llama, found.ids)
    change = change - logits(llama, found.ids)
    np.testing.assert_allclose(found.change, change.numpy(), atol=10 * TOLERANCE)
    assert np.abs(found.change).max() > 0.01


def test_probe(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    probe, found = example
    assert found.activations.shape[:2] == (1, 10_000)
    ids = probe.prompts(llama.config.vocab_size, set(tokenizer.all_special_ids))
    truth = np.concatenate([streams(llama, prompt)[found.layers[0]].numpy() for prompt in ids.tolist()]).astype(
        np.float64
    )
    np.testing.assert_allclose(found.activations[0], truth, atol=TOLERANCE)
    labels = np.where(ids.reshape(-1) < llama.config.vocab_size // 2, -1, 1)
    assert found.classes == (probe.LOWER, probe.UPPER) and found.labels.tolist() == labels.tolist()
    inputs = np.c_[truth, np.ones(len(truth))]
    for part in range(5):
        out = np.zeros(len(truth), bool)
        out[part * 2000 : (part + 1) * 2000] = True
        kept = inputs[~out]
        weights = np.linalg.solve(kept.T @ kept + np.eye(kept.shape[1]), kept.T @ labels[~out])
        np.testing.assert_allclose(found.scores[0, out], inputs[out] @ weights, atol=10 * TOLERANCE)
        right = (np.sign(inputs[out] @ weights) == labels[out]).mean()
        assert found.accuracy[0, part] == pytest.approx(right, abs=2e-3)
    assert found.accuracy.mean() > 0.65


def test_stream_monitor(example: tuple[Any, Any], llama: Any, tokenizer: Any) -> None:
    monitor, (found, stopped) = example
    towards, away = (
        torch.stack([streams(llama, tokenizer.encode(prompt))[found.layer][-1] for prompt in prompts]).mean(0)
        for prompts in (monitor.TOWARDS, monitor.AWAY)
    )
    direction = (towards - away) / (towards - away).norm()
    np.testing.assert_allclose(found.direction, direction.numpy(), atol=TOLERANCE)
    ids, readings, entropies = tokenizer.encode(monitor.PROMPT), [], []
    for token in found.ids:
        stream = streams(llama, ids)
        readings.append(float(stream[found.layer][-1] @ direction))
        distribution = torch.distributions.Categorical(logits=logits(llama, ids))
        entropies.append(float(distribution.entropy()))
        assert int(distribution.logits.argmax()) == token
        ids = [*ids, token]
    np.testing.assert_allclose(found.readings, readings, atol=TOLERANCE)
    np.testing.assert_allclose(found.entropies, entropies, atol=TOLERANCE)
    assert found.arrived.tolist() == list(range(1, monitor.STEPS + 1)), "each reading is here with its token"
    first = next(i for i, reading in enumerate(readings) if reading > stopped.alarm)
    assert stopped.stopped and not found.stopped
    assert stopped.ids == found.ids[: first + 1] and first + 1 < monitor.STEPS
    np.testing.assert_allclose(stopped.readings, readings[: first + 1], atol=TOLERANCE)


def test_prompts_that_do_not_go_together_are_refused(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command: it says why and what to give instead, and draws nothing."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    experiment, patching = (importlib.import_module(name) for name in ("experiment", "activation_patching"))
    prompts = {"clean": patching.CLEAN, "corrupted": patching.CORRUPTED}
    picture = tmp_path / "picture.png"
    for corrupted, said in (("The capital of Spain is", "the same number of tokens"), (patching.CLEAN, "are the same")):
        arguments = [
            "--address",
            service.address,
            "--model",
            "llama",
            "--picture",
            str(picture),
            "--corrupted",
            corrupted,
        ]
        with pytest.raises(SystemExit, match=said) as refused:
            experiment.main(patching.__doc__, patching.run, "unused.png", prompts, arguments)
        assert "--corrupted" in str(refused.value)
    assert not picture.exists()
