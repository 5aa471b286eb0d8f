"""What each component adds to the answer's logit: direct attribution. (Elhage et al., 2021)

The residual stream is a sum: the embedding, and what each layer's attention and MLP added. With the final norm's scale held
fixed, the logits are a linear function of the stream. So each term has its own share of the difference between two tokens. The
block runs norm and unembedding on vectors whose results give their weights and biases, so the kind of norm does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument
from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, as_array, encode, prompts_of, texts

EMBEDDING, BIASES = "embedding", "biases at the end"
AGREEMENT = 0.05  # of the logits' difference: what the shares may miss, as in half precision


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Finding):
    """The share of each component.

    Attributes:
        prompts: the token ids of each prompt.
        tokens: their texts.
        answers: for each prompt the two tokens that are compared; the likeliest token and the next unless others were given.
        answer_texts: their texts.
        names: of the components: the embedding, attention and MLP of each layer, and the biases of norm and unembedding.
        shares: float64 [prompts, components], of the difference of the two tokens' logits.
        difference: float64 [prompts], of these logits, as the model computed them; the shares add up to it.
    """

    PICTURE = "attribution"

    prompts: tuple[list[int], ...]
    tokens: tuple[tuple[str, ...], ...]
    answers: tuple[tuple[int, int], ...]
    answer_texts: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    shares: np.ndarray
    difference: np.ndarray


def attribution(
    model: Any, prompts: Prompt | Sequence[Prompt], *, answers: Sequence[tuple[int, int]] | None = None
) -> Attribution:
    """Attribute the logits at the last token to the components of the model.

    Args:
        model: a served model.
        prompts: one prompt or several: texts, or token ids. There is one trace for each.
        answers: for each prompt the two token ids that are compared; None: the likeliest token and the next.

    Raises:
        InvalidArgument: the shares do not add up, because what follows the last layer is not linear.
    """
    encoded = [encode(model, prompt) for prompt in prompts_of(prompts)]
    if answers is not None and len(answers) != len(encoded):
        raise InvalidArgument(f"there are {len(encoded)} prompts and {len(answers)} pairs of answers")
    found = [_shares(model, ids, answers[number] if answers else None) for number, ids in enumerate(encoded)]
    pairs = tuple(tokens for tokens, _, _ in found)
    shares = np.stack([one for _, one, _ in found])
    names = [EMBEDDING, *(f"{part} {layer}" for layer in range(len(model.blocks)) for part in ("attention", "MLP"))]
    return Attribution(
        tuple(encoded), tuple(texts(model, ids) for ids in encoded), pairs, tuple(texts(model, pair) for pair in pairs),
        (*names, BIASES), shares, np.array([difference for _, _, difference in found]),
    )  # fmt: skip


def _shares(model: Any, ids: list[int], answers: tuple[int, int] | None) -> tuple[tuple[int, int], np.ndarray, float]:
    """Return two tokens, the components' shares [components], and the logits' difference."""
    with model.trace(ids, max_tokens=1, temperature=0.0):
        import torch

        terms: Any = []
        for block in model.blocks:
            before = block.resid_pre[-1].float().clone()
            if not terms:
                terms.append(before)
            middle = block.resid_mid[-1].float().clone()
            terms.append(middle - before)
            after = block.resid_post[-1].float().clone()
            terms.append(after - middle)
        kind = model.blocks[-1].resid_post.dtype
        normed = model.final_norm.output[-1].float()

        # A norm that subtracts the mean gives its bias alone for equal numbers; another gives its weight.
        equal, swing = torch.ones_like(after), torch.ones_like(after)
        swing[1::2] = -1.0
        ones, minus, up, down = model.final_norm(torch.stack([equal, -equal, swing, -swing]).to(kind)).float()
        bias, weight = (ones + minus) / 2, (up - down) / 2 * swing
        centred = float((ones - minus).abs().max()) < 1e-3 * float(weight.abs().max())

        parts = torch.stack(terms)
        if centred:
            parts = parts - parts.mean(-1, keepdim=True)
        parts = parts * weight
        total = parts.sum(0)
        scale = ((normed - bias) @ total) / (total @ total)
        nothing = torch.zeros_like(after)
        alone = model.unembed(torch.stack([*(parts * scale), bias, nothing]).to(kind)).float()
        logits = model.logits.output[0].float()
        first, second = logits.topk(2).indices.tolist() if answers is None else answers
        tokens = (int(first), int(second)).save()
        difference = float(logits[first] - logits[second]).save()
        gaps = (alone[:, first] - alone[:, second]).save()
    *terms, of_bias, of_nothing = as_array(gaps)  # the unembedding of nothing is its own bias
    shares = np.array([*(share - of_nothing for share in terms), of_bias])
    if abs(shares.sum() - difference) > AGREEMENT * max(abs(difference), 1.0):
        raise InvalidArgument(
            f"the components' shares add up to {shares.sum():.3f} and the logits differ by {difference:.3f}: what follows the "
            "last layer of this model is not a norm and a linear unembedding, so its logits cannot be split like this"
        )
    return tokens, shares, difference
