"""Linear probes: is a fact written, linearly, in the residual stream? (Alain & Bengio, 2016)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument
from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, as_array, encode, layer_of, texts

PROMPTS_AT_ONCE = 10


@dataclass(frozen=True, eq=False, repr=False)
class ProbeScores(Finding):
    """What a probe says of new prompts.

    Attributes:
        prompts: the token ids of each prompt.
        tokens: their texts.
        scores: for each prompt float64 [tokens]; above zero: the second class.
        layer: the layer after which the stream was read.
    """

    PICTURE = "probe_scores"

    prompts: tuple[list[int], ...]
    tokens: tuple[tuple[str, ...], ...]
    scores: tuple[np.ndarray, ...]
    layer: int


@dataclass(frozen=True, eq=False, repr=False)
class Probe(Finding):
    """Linear probes of some layers, and how well each layer tells the two classes apart.

    Attributes:
        layers: the numbers of the layers.
        classes: the two labels; a score above zero means the second label.
        activations: float64 [layers, examples, width].
        labels: int64 [examples], -1 or 1.
        fold: int64 [examples], the fold in which an example was held out; a prompt's tokens are in one fold.
        scores: float64 [layers, examples], of each example by the probe that was trained without its fold.
        accuracy: float64 [layers, folds], on the examples that were held out.
        weights: float64 [layers, width + 1], of the probe that was trained on all examples; the last number is the bias.
    """

    PICTURE = "probe"

    layers: tuple[int, ...]
    classes: tuple[Any, Any]
    activations: np.ndarray
    labels: np.ndarray
    fold: np.ndarray
    scores: np.ndarray
    accuracy: np.ndarray
    weights: np.ndarray

    @property
    def best(self) -> int:
        """The index, in `layers`, of the layer with the best mean accuracy."""
        return int(self.accuracy.mean(1).argmax())

    def apply(self, model: Any, prompts: Sequence[Prompt], *, layer: int | None = None) -> ProbeScores:
        """Return the probe's score at each token of some prompts.

        The projection runs in the engine, and one number for each token travels.

        Args:
            model: the served model that the probe was fitted on.
            prompts: texts, or token ids.
            layer: the number of the layer whose probe reads; None: the layer with the best accuracy.

        Raises:
            InvalidArgument: the layer has no probe.
        """
        at = self.layers[self.best] if layer is None else layer_of(model, layer)
        if at not in self.layers:
            raise InvalidArgument(f"layer {at} has no probe; the layers {list(self.layers)} have")
        learned = self.weights[self.layers.index(at)].astype(np.float32)
        weights, bias = learned[:-1], float(learned[-1])
        encoded = [encode(model, prompt) for prompt in prompts]
        found: dict[int, Any] = {}
        for start in range(0, len(encoded), PROMPTS_AT_ONCE):
            with model.trace(max_tokens=1) as tracer:
                scores = {}.save()
                for number, ids in enumerate(encoded[start : start + PROMPTS_AT_ONCE], start):
                    with tracer.invoke(ids):
                        import torch

                        stream = model.blocks[at].resid_post.float()
                        scores[number] = stream @ torch.as_tensor(weights, device=stream.device) + bias
            found |= {number: as_array(one) for number, one in scores.items()}
        spelled = tuple(texts(model, ids) for ids in encoded)
        return ProbeScores(tuple(encoded), spelled, tuple(found[number] for number in range(len(encoded))), at)


def probe(
    model: Any,
    prompts: Sequence[Prompt],
    labels: Sequence[Any],
    *,
    layers: Sequence[int] | None = None,
    folds: int = 5,
    ridge: float = 1.0,
) -> Probe:
    """Fit a ridge regression on the residual stream after each layer.

    The prompts are cut into folds, one after the other. Each fold is held out once, and its accuracy is measured on it.

    Args:
        model: a served model.
        prompts: texts, or token ids.
        labels: for each prompt a label, and the stream is read at the prompt's last token; or for each prompt a list with a label
            for each token, and the stream is read at each token. There are two different labels.
        layers: the numbers of the layers; None: all layers.
        folds: how often a part is held out.
        ridge: the penalty of the weights.

    Raises:
        InvalidArgument: labels and prompts do not go with each other, or there are not two classes.
    """
    encoded = [encode(model, prompt) for prompt in prompts]
    every_token, kinds, signs = _signs(model, encoded, labels)
    if not 2 <= folds <= len(encoded):
        raise InvalidArgument(
            f"folds={folds}: there are at least 2 folds, and at most as many as prompts, {len(encoded)}"
        )
    chosen = sorted({layer_of(model, layer) for layer in (range(len(model.blocks)) if layers is None else layers)})
    streams = _collected(model, encoded, chosen, every_token)
    activations = np.stack([np.concatenate([stream[layer] for stream in streams]) for layer in chosen])
    parts = [number * folds // len(encoded) for number in range(len(encoded))]
    fold = np.repeat(parts, [len(one) for one in signs])
    flat = np.concatenate(signs)
    scores, accuracy = np.zeros((len(chosen), len(flat))), np.zeros((len(chosen), folds))
    for row, part in np.ndindex(len(chosen), folds):
        out = fold == part
        weights = fitted(activations[row, ~out], flat[~out], ridge)
        scores[row, out] = activations[row, out] @ weights[:-1] + weights[-1]
        accuracy[row, part] = (np.where(scores[row, out] > 0, 1, -1) == flat[out]).mean()
    learned = np.stack([fitted(one, flat, ridge) for one in activations])
    return Probe(tuple(chosen), kinds, activations, flat, fold, scores, accuracy, learned)


def fitted(activations: np.ndarray, labels: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """Return a ridge regression's weights, float64 [width + 1]; the last number is the bias.

    Args:
        activations: [examples, width].
        labels: [examples].
        ridge: the penalty.
    """
    inputs = np.c_[activations, np.ones(len(activations))]
    return np.linalg.solve(inputs.T @ inputs + ridge * np.eye(inputs.shape[1]), inputs.T @ labels)


def _signs(
    model: Any, encoded: list[list[int]], labels: Sequence[Any]
) -> tuple[bool, tuple[Any, Any], list[np.ndarray]]:
    """Return whether each token has a label, both labels, and signs, [examples] each."""
    if len(labels) != len(encoded):
        raise InvalidArgument(f"there are {len(encoded)} prompts and {len(labels)} labels")
    every_token = bool(len(labels)) and np.ndim(labels[0]) == 1
    rows = [np.asarray(one).reshape(-1) for one in labels]
    for ids, row in zip(encoded, rows, strict=True):
        if len(row) != (len(ids) if every_token else 1):
            raise InvalidArgument(
                f"a prompt has {len(ids)} tokens and {len(row)} labels: {list(texts(model, ids))}; give one label for each "
                "prompt, or one for each token of each prompt"
            )
    kinds = np.unique(np.concatenate(rows)) if rows else np.array([])
    if len(kinds) != 2:
        raise InvalidArgument(f"a probe tells two labels apart, and there are {len(kinds)}: {kinds[:5].tolist()}")
    return every_token, (kinds[0].item(), kinds[1].item()), [np.where(row == kinds[1], 1, -1) for row in rows]


def _collected(
    model: Any, encoded: list[list[int]], layers: list[int], every_token: bool
) -> list[dict[int, np.ndarray]]:
    """Return each prompt's stream after each layer, [examples, width]."""
    first = 0 if every_token else -1
    collected: dict[int, dict[int, np.ndarray]] = {}
    for start in range(0, len(encoded), PROMPTS_AT_ONCE):
        with model.trace(max_tokens=1) as tracer:
            streams = {}.save()
            for number, ids in enumerate(encoded[start : start + PROMPTS_AT_ONCE], start):
                with tracer.invoke(ids):
                    found = {}
                    for layer in layers:
                        found[layer] = model.blocks[layer].resid_post[first:].float().clone()
                    streams[number] = found
        for number, one in streams.items():
            collected[number] = {layer: as_array(stream) for layer, stream in one.items()}
    return [collected[number] for number in range(len(encoded))]
