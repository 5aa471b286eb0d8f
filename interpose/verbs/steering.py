"""Steering: a difference of means, and what the model says along it. (Rimsky et al., 2024)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, as_array, encode, layer_of, prompts_of, texts, vector_of

STRENGTHS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)


def difference_of_means(
    model: Any, towards: Sequence[Prompt], away: Sequence[Prompt], *, layer: int | None = None
) -> np.ndarray:
    """Return the difference of two sets of prompts in the mean activation at their last tokens.

    Args:
        model: a served model.
        towards, away: the two sets of prompts.
        layer: the layer after which the residual stream is read; None: the layer in the middle.

    Returns:
        The mean over `towards` minus the mean over `away`, float64 [width].
    """
    at = layer_of(model, layer)
    sets = prompts_of(towards), prompts_of(away)
    with model.trace(max_tokens=1) as tracer:
        last = [{}, {}].save()
        for which, prompts in enumerate(sets):
            for number, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    last[which][number] = model.blocks[at].resid_post[-1].float()
    one, other = (np.mean([as_array(each[number]) for number in sorted(each)], 0) for each in last)
    difference: np.ndarray = one - other
    return difference


@dataclass(frozen=True, eq=False, repr=False)
class Steering(Finding):
    """What steering did.

    Attributes:
        prompts: the token ids of each prompt.
        tokens: their texts.
        direction: float32 [width].
        layer: the layer after which the direction was added.
        strengths: float64 [strengths].
        logits: float64 [strengths, prompts, vocabulary], of the first token.
        projections: float64 [strengths, prompts], of the last layer's stream at the last token, on the direction.
        texts: the continuation, [strengths][prompts].
        moved: the token ids whose logits moved most, by the mean over the prompts.
        moved_texts: their texts.
    """

    PICTURE = "steer"

    prompts: tuple[list[int], ...]
    tokens: tuple[tuple[str, ...], ...]
    direction: np.ndarray
    layer: int
    strengths: np.ndarray
    logits: np.ndarray
    projections: np.ndarray
    texts: tuple[tuple[str, ...], ...]
    moved: tuple[int, ...]
    moved_texts: tuple[str, ...]


def steer(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    direction: Any,
    *,
    layer: int | None = None,
    strengths: Sequence[float] = STRENGTHS,
    max_tokens: int = 12,
    most: int = 6,
) -> Steering:
    """Generate with a direction added after one layer, at each token and in each step.

    Args:
        model: a served model.
        prompts: one prompt or several: texts, or token ids. There is one trace for all prompts and strengths.
        direction: a vector [width], e.g. of `difference_of_means`.
        layer: the layer after which the direction is added; None: the layer in the middle.
        strengths: numbers that the direction is multiplied with.
        max_tokens: how many tokens are generated.
        most: how many tokens are named whose logits moved most.

    Raises:
        InvalidArgument: the direction is no vector of finite numbers.
    """
    vector, at, last = vector_of(direction), layer_of(model, layer), len(model.blocks) - 1
    encoded = [encode(model, prompt) for prompt in prompts_of(prompts)]
    unit = vector / (np.linalg.norm(vector) or 1.0)
    runs = [(row, column) for row in range(len(strengths)) for column in range(len(encoded))]
    with model.trace(max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as tracer:
        logits, projections, words = {}.save(), {}.save(), {}.save()
        for run in runs:
            strength = float(strengths[run[0]])
            with tracer.invoke(encoded[run[1]]):
                import torch

                for step in tracer.iter[:]:
                    stream = model.blocks[at].resid_post
                    stream[:] += strength * torch.as_tensor(vector, dtype=stream.dtype, device=stream.device)
                    if step == 0:
                        end = model.blocks[last].resid_post[-1].float()
                        projections[run] = float(end @ torch.as_tensor(unit, device=end.device))
                        logits[run] = model.logits.output[0].float()
                words[run] = tracer.result.text
    shape = len(strengths), len(encoded)
    scores = np.stack([as_array(logits[run]) for run in runs]).reshape(*shape, -1)
    change = np.abs(scores[-1] - scores[0]).mean(0)
    moved = tuple(int(token) for token in np.argsort(change)[::-1][:most])
    return Steering(
        tuple(encoded),
        tuple(texts(model, ids) for ids in encoded),
        vector,
        at,
        as_array(list(strengths)),
        scores,
        as_array([projections[run] for run in runs]).reshape(shape),
        tuple(tuple(words[row, column] for column in range(shape[1])) for row in range(shape[0])),
        moved,
        texts(model, moved),
    )
