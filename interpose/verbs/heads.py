"""Attention heads: the tokens that each head looks at, and what each head is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, as_array, encode, layer_of, prompts_of, texts


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Finding):
    """The attention pattern of each layer.

    Attributes:
        ids: the token ids of the prompt.
        tokens: their texts.
        layers: the numbers of the layers.
        patterns: float64 [layers, heads, tokens, tokens]; each row sums to one.
    """

    PICTURE = "attention"

    ids: list[int]
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    patterns: np.ndarray


def attention(model: Any, prompt: Prompt, *, layers: Sequence[int] | None = None) -> Attention:
    """Read the attention pattern of each layer, recomputed from the layer's queries and keys.

    Args:
        model: a served model.
        prompt: a text, or token ids.
        layers: the numbers of the layers; None: all layers.
    """
    ids = encode(model, prompt)
    chosen = sorted({layer_of(model, layer) for layer in (range(len(model.blocks)) if layers is None else layers)})
    with model.trace(ids, max_tokens=1):
        patterns = [model.blocks[layer].attn.pattern.float().clone() for layer in chosen].save()
    return Attention(ids, texts(model, ids), tuple(chosen), np.stack([as_array(pattern) for pattern in patterns]))


@dataclass(frozen=True, eq=False, repr=False)
class HeadAblation(Finding):
    """What each head is worth.

    Attributes:
        prompts: the token ids of each prompt.
        tokens: their texts.
        answers: the token that the model says after each prompt without ablation.
        answer_texts: their texts.
        change: float64 [prompts, layers, heads], of the answer's log probability, in nats; NaN where a layer has fewer heads
            than another layer.
    """

    PICTURE = "head_ablation"

    prompts: tuple[list[int], ...]
    tokens: tuple[tuple[str, ...], ...]
    answers: tuple[int, ...]
    answer_texts: tuple[str, ...]
    change: np.ndarray


def head_ablation(model: Any, prompts: Prompt | Sequence[Prompt]) -> HeadAblation:
    """Set each head to zero before the output projection, one at a time. (Michel et al., 2019)

    There is one trace for each layer and prompt, with one invoke for each head.

    Args:
        model: a served model.
        prompts: one prompt or several: texts, or token ids.
    """
    encoded = [encode(model, prompt) for prompt in prompts_of(prompts)]
    answers, changes = [], []
    for ids in encoded:
        with model.trace(ids, max_tokens=1, temperature=0.0):
            heads = [block.attn.z.shape[1] for block in model.blocks].save()
            intact = model.logits.output[0].float().log_softmax(-1)
            answer = int(intact.argmax()).save()
            score = float(intact.max()).save()
        change = np.full((len(heads), max(heads)), np.nan)
        for layer, count in enumerate(heads):
            for head, ablated in _ablated(model, ids, layer, count, answer).items():
                change[layer, head] = ablated - score
        answers.append(answer)
        changes.append(change)
    spelled = tuple(texts(model, ids) for ids in encoded)
    return HeadAblation(tuple(encoded), spelled, tuple(answers), texts(model, answers), np.stack(changes))


def _ablated(model: Any, ids: list[int], layer: int, heads: int, answer: int) -> Any:
    """Return the answer's log probability without each head of a layer, by head."""
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        scores = {}.save()
        for head in range(heads):
            with tracer.invoke(ids):
                model.blocks[layer].attn.z[:, head] = 0
                scores[head] = float(model.logits.output[0].float().log_softmax(-1)[answer])
    return scores
