"""Sparse autoencoders: features of the stream and their effect. (Bricken et al., 2023)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument
from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, as_array, encode, layer_of, texts

WEIGHTS = ("W_enc", "b_enc", "W_dec", "b_dec")


@dataclass(frozen=True, eq=False, repr=False)
class SparseFeatures(Finding):
    """What the dictionary says.

    Attributes:
        ids: the token ids of the prompt.
        tokens: their texts.
        activations: float64 [tokens, features], none below zero.
        feature: the feature that was switched off.
        change: float64 [vocabulary], of the next token's logits without that feature.
        layer: the layer after which the stream was read.
        moved: the token ids whose logits moved most.
        moved_texts: their texts.
    """

    PICTURE = "sae"

    ids: list[int]
    tokens: tuple[str, ...]
    activations: np.ndarray
    feature: int
    change: np.ndarray
    layer: int
    moved: tuple[int, ...]
    moved_texts: tuple[str, ...]


def sae(
    model: Any,
    prompt: Prompt,
    weights: Mapping[str, Any],
    *,
    layer: int | None = None,
    feature: int | None = None,
    subtract_decoder_bias: bool = True,
    most: int = 12,
) -> SparseFeatures:
    """Encode the stream after a layer, switch one feature off, and compare the logits.

    The stream is replaced by the dictionary's reconstruction and its error, with all features and without one. The error is kept,
    so the difference comes from the feature alone. The weights travel to the engine with the block.

    Args:
        model: a served model.
        prompt: a text, or token ids.
        weights: W_enc [width, features], b_enc [features], W_dec [features, width] and b_dec [width], of a ReLU dictionary; with
            `threshold` [features] of a JumpReLU dictionary. Other kinds of dictionary are refused where their names tell.
        layer: the layer after which the stream is read; None: the layer in the middle.
        feature: the feature that is switched off; None: the most active feature at the last token.
        subtract_decoder_bias: whether the decoder's bias is subtracted before the encoder.
        most: how many tokens are named whose logits moved most.

    Raises:
        InvalidArgument: the weights do not fit each other, or have other names.
    """
    encoder, bias, decoder, shift, threshold = _weights(weights)
    if feature is not None and not 0 <= feature < len(decoder):
        raise InvalidArgument(f"feature={feature}: the dictionary has the features 0 to {len(decoder) - 1}")
    ids, at, given = encode(model, prompt), layer_of(model, layer), feature
    parts = (encoder, bias, decoder, shift, threshold, shift if subtract_decoder_bias else np.zeros_like(shift))
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(ids):
            import torch

            stream = model.blocks[at].resid_post
            into, plus, out, back, least, before = (torch.as_tensor(part, device=stream.device) for part in parts)
            raw = (stream.float() - before) @ into + plus
            active = (raw * (raw - least > 0)).save()
            error = stream.float() - (active @ out + back)
            stream[:] = active @ out + back + error
            intact = model.logits.output[0].float().save()
        with tracer.invoke(ids):
            import torch

            stream = model.blocks[at].resid_post
            into, plus, out, back, least, before = (torch.as_tensor(part, device=stream.device) for part in parts)
            raw = (stream.float() - before) @ into + plus
            features = raw * (raw - least > 0)
            error = stream.float() - (features @ out + back)
            chosen = (int(features[-1].argmax()) if given is None else given).save()
            features[:, chosen] = 0
            stream[:] = features @ out + back + error
            without = model.logits.output[0].float().save()
    change = as_array(without) - as_array(intact)
    moved = tuple(int(token) for token in np.argsort(np.abs(change))[::-1][:most])
    return SparseFeatures(ids, texts(model, ids), as_array(active), int(chosen), change, at, moved, texts(model, moved))


def _weights(weights: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """Return a dictionary's arrays, float32: encoder, its bias, decoder, its bias, threshold.

    Returns:
        [width, features], [features], [features, width], [width] and [features].
    """
    if not isinstance(weights, Mapping) or not set(WEIGHTS) <= set(weights) <= {*WEIGHTS, "threshold"}:
        names = sorted(weights) if isinstance(weights, Mapping) else type(weights).__name__
        raise InvalidArgument(
            f"weights is a dict with {', '.join(WEIGHTS)}, and `threshold` for JumpReLU, and this has {names}: "
            "another kind of dictionary computes its features otherwise"
        )
    arrays = {name: as_array(weights[name]).astype(np.float32) for name in weights}
    shapes = {name: array.shape for name, array in arrays.items()}
    width, features = (*shapes["W_enc"], 0, 0)[:2]
    right = {"W_enc": (width, features), "b_enc": (features,), "W_dec": (features, width), "b_dec": (width,)}
    right["threshold"] = (features,)
    wrong = [
        f"{name} is {list(shape)}, not {list(right[name])}" for name, shape in shapes.items() if shape != right[name]
    ]
    if wrong:
        raise InvalidArgument("the weights do not fit each other: " + "; ".join(wrong))
    threshold = arrays.get("threshold", np.zeros(features, np.float32))
    return (*(arrays[name] for name in WEIGHTS), threshold)
