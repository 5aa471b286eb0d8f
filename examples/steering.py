"""Steering: pushes the residual stream along a difference of means.

    python examples/steering.py --address localhost:9000

The direction is the mean activation at the last token over one set of prompts, minus the mean over another set. It is added
after one layer, at every token and in every step of the generation, with several strengths at once. (Rimsky et al., 2024)
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

TOWARDS = ["The food was delicious and", "What a wonderful day, I love", "She smiled happily and"]
AWAY = ["The food was disgusting and", "What a horrible day, I hate", "She cried bitterly and"]
PROMPT = "We went to the new restaurant, and the evening was"
DEPTH = 0.5  # of the layer that is steered; 1: after the last
STRENGTHS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
STEPS = 12
CHARACTERS = 100  # of a continuation that fit a line of the picture


@dataclass(frozen=True)
class Steering:
    """What steering did.

    Attributes:
        direction: [hidden].
        logits: [strengths, vocab], of the first token.
        projections: [strengths], of the last layer's stream at the last token, on the direction.
        texts: the continuation at each strength.
        layer: after which the direction was added.
        prompt: what the model read.
    """

    direction: np.ndarray
    logits: np.ndarray
    projections: np.ndarray
    texts: list[str]
    layer: int
    prompt: str = PROMPT


def run(model: Any, prompt: str = PROMPT) -> Steering:
    """Find the direction and generate with every strength."""
    layer = experiment.layer_at(model, DEPTH)
    direction = experiment.difference_of_means(model, layer, TOWARDS, AWAY)
    last = len(model.blocks) - 1
    with model.trace(max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        logits, projections, texts = {}.save(), {}.save(), {}.save()
        for strength in STRENGTHS:
            with tracer.invoke(prompt):
                for step in tracer.iter[:]:
                    model.blocks[layer].resid_post[:] += strength * direction
                    if step == 0:
                        unit = direction / direction.norm()
                        projections[strength] = float(model.blocks[last].resid_post[-1].float() @ unit)
                        logits[strength] = model.logits.output[0].float()
                texts[strength] = tracer.result.text
    return Steering(
        experiment.as_array(direction),
        np.stack([experiment.as_array(logits[strength]) for strength in STRENGTHS]),
        experiment.as_array([projections[strength] for strength in STRENGTHS]),
        [texts[strength] for strength in STRENGTHS],
        layer,
        prompt,
    )


def draw(model: Any, found: Steering, picture: Path) -> None:
    """Write the logits that moved most over the strength, and what the model said."""
    moved = np.abs(found.logits[-1] - found.logits[0])
    figure = pictures.figure(8.5, 6.4)
    curves, words = figure.subplots(2, 1, height_ratios=(1.5, 1))
    for token in np.argsort(moved)[::-1][:6]:
        (label,) = experiment.labels_of(model, [token])
        curves.plot(STRENGTHS, found.logits[:, token], marker="o", label=label)
    curves.set_xlabel("strength")
    curves.set_ylabel("logit of the next token")
    curves.set_title("the logits that move most", loc="left", fontsize=11)
    figure.legend(prop={"family": "monospace", "size": 8}, loc="outside right upper")
    words.axis("off")
    words.set_title(f"“{textwrap.shorten(found.prompt, 70, placeholder='…')} …”", loc="left", fontsize=11)
    for row, (strength, text) in enumerate(zip(STRENGTHS, found.texts, strict=True)):
        line = f"{strength:+5.1f}  {text}".replace("$", r"\$").replace("\n", "↵").replace("\t", "→")
        line = line if len(line) <= CHARACTERS else line[: CHARACTERS - 1] + "…"
        words.text(0.0, 1 - (row + 0.6) / len(STRENGTHS), line, family="monospace", fontsize=8, va="center")
    caption = f"The direction was added after layer {found.layer}, at every token and in every step."
    pictures.save(figure, caption, picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "steering.png", {"prompt": PROMPT})
