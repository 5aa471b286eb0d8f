"""Lenses: what each layer would predict if it were the last layer.

A logit lens applies the final norm and the unembedding to the residual stream after each layer (nostalgebraist, 2020). A Jacobian
lens takes the stream to the last layer first, by the mean Jacobian of the last layer's stream with respect to the layer's stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument
from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, as_array, decode, encode, texts


@dataclass(frozen=True, eq=False, repr=False)
class Lens(Finding):
    """What each layer predicts.

    Attributes:
        prompt: the token ids of the prompt.
        tokens: their texts.
        layers: the numbers of the layers.
        answer: the token whose climb is shown; the likeliest next token unless another was given.
        answer_text: its text.
        ids: int64 [layers, tokens], the likeliest next token at each position.
        texts: its text, [layers][tokens].
        probabilities: float64 [layers, tokens], its probability.
        ranks: int64 [layers], the answer's rank at the last position; 1 is the likeliest.
        climb: float64 [layers], the answer's probability there.
    """

    PICTURE = "lens"

    prompt: list[int]
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    answer: int
    answer_text: str
    ids: np.ndarray
    texts: tuple[tuple[str, ...], ...]
    probabilities: np.ndarray
    ranks: np.ndarray
    climb: np.ndarray


def lens_of(model: Any, prompt: list[int], layers: tuple[int, ...], answer: int, best: Any, climb: Any) -> Lens:
    """Return a lens from what a block saved.

    Args:
        model: the served model.
        prompt: its token ids.
        layers: the numbers of the layers.
        answer: a token id.
        best: (ids, probabilities), [tokens] each, for each layer.
        climb: (rank, probability) of the answer for each layer.
    """
    ids, probabilities = (np.stack([as_array(one[which]) for one in best]) for which in (0, 1))
    ranks, climbs = as_array(climb).T
    ids = ids.astype(np.int64)
    spelled = texts(model, ids.reshape(-1))
    rows = tuple(spelled[start : start + ids.shape[1]] for start in range(0, ids.size, ids.shape[1]))
    return Lens(
        prompt, texts(model, prompt), layers, answer, decode(model, answer), ids, rows, probabilities,
        ranks.astype(np.int64), climbs,
    )  # fmt: skip


def logit_lens(model: Any, prompt: Prompt, *, answer: int | None = None) -> Lens:
    """Look at one prompt through the logit lens.

    Args:
        model: a served model.
        prompt: a text, or token ids.
        answer: the token id whose climb is shown; None: the likeliest next token.
    """
    ids, target = encode(model, prompt), answer
    with model.trace(ids, max_tokens=1, temperature=0.0):
        best, last = [].save(), []
        for block in model.blocks:
            scores = model.unembed(model.final_norm(block.resid_post)).float()
            top = scores.softmax(-1).max(-1)
            best.append((top.indices, top.values))
            last.append(scores[-1])
        if target is None:
            target = int(model.logits.output[0].argmax())
        found = int(target).save()
        climb = [(int((row > row[found]).sum()) + 1, float(row.softmax(-1)[found])) for row in last].save()
    return lens_of(model, ids, tuple(range(len(best))), found, best, climb)


def jacobian_lens(model: Any, prompt: Prompt, matrices: Any, *, answer: int | None = None) -> Lens:
    """Look at one prompt through a Jacobian lens.

    Args:
        model: a served model.
        prompt: a text, or token ids.
        matrices: a matrix [width, width] for each layer: an array [layers, width, width] for all layers, or a dict by layer
            number. Row i of a matrix is the derivative of number i of the last layer's stream. `fit_jacobian_lens` makes them.
        answer: the token id whose climb is shown; None: the likeliest next token.

    Raises:
        InvalidArgument: the matrices do not fit the model.
    """
    chosen = _chosen(model, matrices)
    ids, target, layers = encode(model, prompt), answer, list(chosen)
    with model.trace(ids, max_tokens=1, temperature=0.0):
        import torch

        best, last = [].save(), []
        for layer in layers:
            stream = model.blocks[layer].resid_post
            taken = stream.float() @ torch.as_tensor(chosen[layer], device=stream.device).T
            scores = model.unembed(model.final_norm(taken.to(stream.dtype))).float()
            top = scores.softmax(-1).max(-1)
            best.append((top.indices, top.values))
            last.append(scores[-1])
        if target is None:
            target = int(model.logits.output[0].argmax())
        found = int(target).save()
        climb = [(int((row > row[found]).sum()) + 1, float(row.softmax(-1)[found])) for row in last].save()
    return lens_of(model, ids, tuple(layers), found, best, climb)


def _chosen(model: Any, matrices: Any) -> dict[int, np.ndarray]:
    """Return the matrices by layer, in order of the layers, float32 [width, width] each."""
    count = len(model.blocks)
    if not isinstance(matrices, Mapping):
        if len(matrices) != count:
            raise InvalidArgument(
                f"there are {len(matrices)} matrices and {count} layers; give a dict by layer number for some layers"
            )
        matrices = dict(enumerate(matrices))
    wrong = [layer for layer in matrices if layer not in range(count)]
    if wrong or not matrices:
        raise InvalidArgument(f"layers {wrong} have matrices, and the model has the layers 0 to {count - 1}")
    chosen = {layer: as_array(matrices[layer]).astype(np.float32) for layer in sorted(matrices)}
    shapes = {matrix.shape for matrix in chosen.values()}
    if len(shapes) > 1 or any(len(shape) != 2 or shape[0] != shape[1] for shape in shapes):
        raise InvalidArgument(f"the matrices are square and of one size, [width, width]; these are {sorted(shapes)}")
    return chosen
