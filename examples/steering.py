"""Steering: pushes the residual stream along a difference of means.

    python examples/steering.py --address localhost:9000

The direction is the mean activation at the last token over one set of prompts, minus the mean over another set. It is added
after one layer, at every token and in every step of the generation, with several strengths at once. (Rimsky et al., 2024)
"""

from __future__ import annotations

from typing import Any

import experiment

from interpose import verbs

TOWARDS = ["The food was delicious and", "What a wonderful day, I love", "She smiled happily and"]
AWAY = ["The food was disgusting and", "What a horrible day, I hate", "She cried bitterly and"]
PROMPT = "We went to the new restaurant, and the evening was"
DEPTH = 0.5  # of the layer that is steered; 1: after the last
STRENGTHS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
STEPS = 12


def run(model: Any, prompt: str = PROMPT) -> verbs.Steering:
    """Find the direction and generate with every strength."""
    layer = verbs.layer_at(model, DEPTH)
    direction = verbs.difference_of_means(model, TOWARDS, AWAY, layer=layer)
    return verbs.steer(model, prompt, direction, layer=layer, strengths=STRENGTHS, max_tokens=STEPS)


if __name__ == "__main__":
    experiment.main(__doc__, run, "steering.png", {"prompt": PROMPT})
