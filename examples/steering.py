"""Steering along a difference of means: push the residual stream towards one set of prompts. (Rimsky et al., 2024)

    python examples/steering.py --address localhost:9000

The direction is the mean activation at the last token over one set of prompts, less that over another. It is added
after one layer, at every token and in every step of the generation, in several strengths at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np

TOWARDS = ["The water is cold and", "The night is dark and", "The fox runs into the"]
AWAY = ["The capital of Spain is", "One, two, three,", "Paris is in"]
PROMPT = "Once upon a time there was"
LAYER = 1
STRENGTHS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
STEPS = 8


@dataclass(frozen=True)
class Steering:
    """What steering did.

    Attributes:
        direction: [hidden].
        logits: [strengths, vocab], of the first token.
        projections: [strengths], of the last layer's stream at the last token, on the direction.
        texts: the continuation at each strength.
    """

    direction: np.ndarray
    logits: np.ndarray
    projections: np.ndarray
    texts: list[str]


def run(model: Any) -> Steering:
    """Find the direction and generate with every strength."""
    direction = experiment.difference_of_means(model, LAYER, TOWARDS, AWAY)
    last = len(model.blocks) - 1
    with model.trace(max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        logits, projections, texts = {}.save(), {}.save(), {}.save()
        for strength in STRENGTHS:
            with tracer.invoke(PROMPT):
                for step in tracer.iter[:]:
                    model.blocks[LAYER].resid_post[:] += strength * direction
                    if step == 0:
                        unit = direction / direction.norm()
                        projections[strength] = float(model.blocks[last].resid_post[-1] @ unit)
                        logits[strength] = model.logits.output[0]
                texts[strength] = tracer.result.text
    return Steering(
        experiment.as_array(direction),
        np.stack([experiment.as_array(logits[strength]) for strength in STRENGTHS]),
        experiment.as_array([projections[strength] for strength in STRENGTHS]),
        [texts[strength] for strength in STRENGTHS],
    )


def draw(model: Any, found: Steering, picture: Path) -> None:
    """Write the logits that moved most over the strength, and what the model said."""
    moved = np.abs(found.logits[-1] - found.logits[0])
    figure, (curves, words) = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(1.3, 1))
    for token in np.argsort(moved)[::-1][:6]:
        label = experiment.shown(model.tokenizer.decode([int(token)]))
        curves.plot(STRENGTHS, found.logits[:, token], marker="o", label=label)
    curves.set_xlabel("strength")
    curves.set_ylabel("logit of the next token")
    curves.set_title(f"“{PROMPT} …”: the logits that move most", loc="left", fontsize=11)
    curves.legend(prop={"family": "monospace"})
    words.axis("off")
    words.set_title("the continuation", loc="left", fontsize=11)
    for row, (strength, text) in enumerate(zip(STRENGTHS, found.texts, strict=True)):
        clean = text.replace("$", r"\$").replace("\n", "↵")
        words.text(0.0, 1 - (row + 1) / (len(STRENGTHS) + 1), f"{strength:+5.1f}  {clean}", family="monospace")
    figure.subplots_adjust(bottom=0.2, left=0.07, right=0.99)
    caption = f"The direction was added after layer {LAYER}, at every token and in every step."
    experiment.save(figure, caption, picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "steering.png")
