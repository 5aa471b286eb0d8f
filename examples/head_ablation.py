"""Head ablation: how much of the answer does each attention head carry?

    python examples/head_ablation.py --address localhost:9000

There is one invoke for each head and one trace for each layer. An invoke sets the head's values to zero before the output
projection. The log probability of the answer is compared with that of a run without ablation. (Michel et al., 2019)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

PROMPT = "The quick brown fox jumps over the lazy"


@dataclass(frozen=True)
class Ablation:
    """What each head is worth.

    Attributes:
        answer: the token that the model says without ablation.
        change: [layers, heads], of the answer's log probability; NaN where a layer has fewer heads than another.
        prompt: what the model read.
    """

    answer: int
    change: np.ndarray
    prompt: str = PROMPT


def run(model: Any, prompt: str = PROMPT) -> Ablation:
    """Ablate every head of every layer, one at a time."""
    with model.trace(prompt, max_tokens=1, temperature=0.0):
        heads = [block.attn.z.shape[1] for block in model.blocks].save()
        intact = model.logits.output[0].float().log_softmax(-1)
        answer = int(intact.argmax()).save()
        score = float(intact.max()).save()
    change = np.full((len(heads), max(heads)), np.nan)
    for layer, count in enumerate(heads):
        for head, ablated in _ablated(model, prompt, layer, count, answer).items():
            change[layer, head] = ablated - score
    return Ablation(answer, change, prompt)


def _ablated(model: Any, prompt: str, layer: int, heads: int, answer: int) -> Any:
    """Return the answer's log probability without each head of a layer, by head."""
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        scores = {}.save()
        for head in range(heads):
            with tracer.invoke(prompt):
                model.blocks[layer].attn.z[:, head] = 0
                scores[head] = float(model.logits.output[0].float().log_softmax(-1)[answer])
    return scores


def draw(model: Any, found: Ablation, picture: Path) -> None:
    """Write the changes as a heat map of layers and heads."""
    layers, heads = found.change.shape
    cells = pictures.Cells.fit(layers, heads)
    figure, axis = pictures.table_figure(cells)
    rows, columns = pictures.layer_labels(layers), [f"head {head}" for head in range(heads)]
    (answer,) = experiment.labels_of(model, [found.answer])
    title = f"change of log p(“{answer}”) without the head"
    image = pictures.heat_map(axis, found.change, rows, columns, title, cells=cells)
    figure.colorbar(image, ax=axis, label="nats", aspect=40)
    caption = f"Prompt: “{found.prompt}”. Heads zeroed before the output projection, one at a time."
    pictures.save(figure, caption, picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "head-ablation.png", {"prompt": PROMPT})
