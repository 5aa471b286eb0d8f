"""Activation patching: where in the model, and at which token, is the answer decided? (Meng et al., 2022)

    python examples/activation_patching.py --address localhost:9000

Two prompts differ in one token. While the model reads the second one, one activation of the first is put in its place:
the residual stream after one layer, at one position. What share of the first prompt's answer comes back says how much
of the difference that place carries. All runs are invokes of one trace, so the first prompt's activations never leave
the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np

CLEAN = "The capital of Japan is in"
SUBJECT = 4  # the token that differs, counted from the end
INSTEAD = " Spain"


@dataclass(frozen=True)
class Patching:
    """What came back.

    Attributes:
        clean, corrupted: the prompts' token ids.
        answers: the token that each prompt leads to.
        share: [layers, positions]; 0: as without the patch, 1: as with the first prompt.
    """

    clean: list[int]
    corrupted: list[int]
    answers: tuple[int, int]
    share: np.ndarray


def run(model: Any) -> Patching:
    """Patch every layer and position."""
    clean = model.tokenizer.encode(CLEAN)
    corrupted = [*clean]
    corrupted[-SUBJECT] = model.tokenizer.encode(INSTEAD)[-1]
    layers, positions = len(model.blocks), len(clean)

    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        differences = {}.save()  # the logit of the first prompt's answer, less that of the second's
        with tracer.invoke(clean):
            stream = [block.resid_post.clone() for block in model.blocks]
            right = model.logits.output[0]
        with tracer.invoke(corrupted):
            wrong = model.logits.output[0]
            answers = (int(right.argmax()), int(wrong.argmax())).save()
            differences["clean"] = float(right[answers[0]] - right[answers[1]])
            differences["corrupted"] = float(wrong[answers[0]] - wrong[answers[1]])
        for layer in range(layers):
            for position in range(positions):
                with tracer.invoke(corrupted):
                    model.blocks[layer].resid_post[position] = stream[layer][position]
                    logits = model.logits.output[0]
                    differences[layer, position] = float(logits[answers[0]] - logits[answers[1]])

    lowest, span = differences["corrupted"], differences["clean"] - differences["corrupted"]
    share = [[(differences[layer, at] - lowest) / span for at in range(positions)] for layer in range(layers)]
    return Patching(clean, corrupted, answers, experiment.as_array(share))


def draw(model: Any, found: Patching, picture: Path) -> None:
    """Write the shares as a heat map of layers and positions."""
    labels = [
        one if one == other else f"{one}\n→{other}"
        for one, other in zip(
            experiment.tokens_of(model, found.clean), experiment.tokens_of(model, found.corrupted), strict=True
        )
    ]
    first, second = experiment.tokens_of(model, found.answers)
    figure, axis = plt.subplots(figsize=(2.5 + 0.85 * len(labels), 1.8 + 0.6 * len(found.share)))
    rows = [f"layer {layer}" for layer in range(len(found.share))]
    image = experiment.heat_map(axis, found.share, rows, labels, f"how much of “{first}” over “{second}” comes back")
    figure.colorbar(image, ax=axis, label="share restored")
    figure.subplots_adjust(bottom=0.28, left=0.12, right=0.98)
    caption = "Each cell: the residual stream after that layer, at that token, was taken from the other prompt."
    experiment.save(figure, caption, picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "activation-patching.png")
