"""Activation patching: where, and at which token, is the answer decided? (Meng et al., 2022)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument
from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, decode, encode, texts

RUNS_AT_ONCE = 256  # patched runs in one trace


@dataclass(frozen=True, eq=False, repr=False)
class PatchSweep(Finding):
    """The share of the answer that each patch brings back.

    Attributes:
        clean, corrupted: the token ids of the prompts.
        clean_tokens, corrupted_tokens: their texts.
        answers: the token that each prompt leads to.
        answer_texts: their texts.
        share: float64 [layers, tokens]; 0: as without the patch, 1: as with the clean prompt.
    """

    PICTURE = "patch_sweep"

    clean: list[int]
    corrupted: list[int]
    clean_tokens: tuple[str, ...]
    corrupted_tokens: tuple[str, ...]
    answers: tuple[int, int]
    answer_texts: tuple[str, str]
    share: np.ndarray


def patch_sweep(model: Any, clean: Prompt, corrupted: Prompt, *, answers: tuple[int, int] | None = None) -> PatchSweep:
    """Patch the residual stream of each layer at each token, from one prompt into another.

    While the model reads the corrupted prompt, the stream after one layer at one token is replaced by the clean prompt's stream.
    The runs are invokes of one trace, or of a few traces if there are more than 256 runs. The clean prompt's stream never
    leaves the engine. The tokens that both prompts begin with are not patched in any run: no later token reaches them, so their
    streams are equal, and their share is 0.

    Args:
        model: a served model.
        clean, corrupted: texts or token ids, of the same number of tokens.
        answers: the token ids whose logits are compared; None: the token that each prompt leads to.

    Raises:
        InvalidArgument: the prompts differ in length, are the same, or lead to the same answer.
    """
    one, other = _both(model, clean, corrupted)
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(one):
            right = model.logits.output[0].float().save()
        with tracer.invoke(other):
            wrong = model.logits.output[0].float().save()
    first, second = answers or (int(right.argmax()), int(wrong.argmax()))
    highest, lowest = (float(logits[first] - logits[second]) for logits in (right, wrong))
    if first == second or highest == lowest:
        raise InvalidArgument(
            f"the model goes on with {decode(model, first)!r} after both prompts, so there is no difference to restore; "
            "give prompts with different answers"
        )
    layers, positions = len(model.blocks), range(_shared(one, other), len(one))
    differences = np.full((layers, len(one)), lowest)  # the logit of the first answer, less the logit of the second
    at_once = max(1, RUNS_AT_ONCE // len(positions))
    for start in range(0, layers, at_once):
        chosen = list(range(start, min(start + at_once, layers)))
        for (layer, position), difference in _patched(model, one, other, chosen, positions, (first, second)).items():
            differences[layer, position] = difference
    share = (differences - lowest) / (highest - lowest)
    spelled = (decode(model, first), decode(model, second))
    return PatchSweep(one, other, texts(model, one), texts(model, other), (first, second), spelled, share)


def _shared(clean: list[int], corrupted: list[int]) -> int:
    """Return how many tokens two different prompts of one length begin with alike."""
    return next(at for at, (one, other) in enumerate(zip(clean, corrupted, strict=True)) if one != other)


def _patched(
    model: Any, clean: list[int], corrupted: list[int], layers: list[int], positions: range, answers: tuple[int, int]
) -> Any:
    """Return the difference of the two answers' logits with each patch, by (layer, position)."""
    first, second = answers
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        differences = {}.save()
        with tracer.invoke(clean):
            stream = {layer: model.blocks[layer].resid_post.clone() for layer in layers}
        for layer in layers:
            for position in positions:
                with tracer.invoke(corrupted):
                    model.blocks[layer].resid_post[position] = stream[layer][position]
                    logits = model.logits.output[0].float()
                    differences[layer, position] = float(logits[first] - logits[second])
    return differences


def _both(model: Any, clean: Prompt, corrupted: Prompt) -> tuple[list[int], list[int]]:
    """Return both prompts' token ids.

    Raises:
        InvalidArgument: the prompts differ in length, or are the same.
    """
    one, other = encode(model, clean), encode(model, corrupted)
    if len(one) != len(other):
        spelled = "\n".join(f"  {len(ids):2} tokens: {list(texts(model, ids))}" for ids in (one, other))
        raise InvalidArgument(
            f"the prompts must have the same number of tokens, so that each position has its counterpart:\n{spelled}\n"
            "Give prompts that this model's tokenizer splits alike."
        )
    if one == other:
        raise InvalidArgument("the prompts are the same; give two prompts that differ")
    return one, other
