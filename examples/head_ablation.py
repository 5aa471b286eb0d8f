"""Head ablation: what does the model's answer lose with each attention head? (Michel et al., 2019)

    python examples/head_ablation.py --address localhost:9000

One invoke for each head: the head's values are zeroed before the output projection, and the log probability of the
answer without any ablation is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np

PROMPT = "The quick brown fox jumps over the lazy"


@dataclass(frozen=True)
class Ablation:
    """What each head is worth.

    Attributes:
        answer: the token that the whole model says.
        change: [layers, heads], of the answer's log probability.
    """

    answer: int
    change: np.ndarray


def run(model: Any) -> Ablation:
    """Ablate every head of every layer, one at a time."""
    layers = len(model.blocks)
    with model.trace(PROMPT, max_tokens=1):
        heads = model.blocks[0].attn.z.shape[1].save()

    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        scores = {}.save()
        with tracer.invoke(PROMPT):
            whole = model.logits.output[0].log_softmax(-1)
            answer = int(whole.argmax()).save()
            scores["whole"] = float(whole.max())
        for layer in range(layers):
            for head in range(heads):
                with tracer.invoke(PROMPT):
                    model.blocks[layer].attn.z[:, head] = 0
                    scores[layer, head] = float(model.logits.output[0].log_softmax(-1)[answer])

    change = [[scores[layer, head] - scores["whole"] for head in range(heads)] for layer in range(layers)]
    return Ablation(answer, experiment.as_array(change))


def draw(model: Any, found: Ablation, picture: Path) -> None:
    """Write the changes as a heat map of layers and heads."""
    layers, heads = found.change.shape
    figure, axis = plt.subplots(figsize=(3.2 + 0.9 * heads, 1.8 + 0.6 * layers))
    rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
    (answer,) = experiment.tokens_of(model, [found.answer])
    image = experiment.heat_map(axis, found.change, rows, columns, f"change of log p(“{answer}”) without the head")
    figure.colorbar(image, ax=axis, label="nats")
    figure.subplots_adjust(bottom=0.2, left=0.15, right=0.97)
    experiment.save(figure, f"Prompt: “{PROMPT}”. Heads zeroed before the output projection, one at a time.", picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "head-ablation.png")
