"""Attention patterns: which tokens does each head look at?

    python examples/attention.py --address localhost:9000

The engine's attention kernels keep no probabilities. The pattern is recomputed from the layer's own queries and keys
where a block asks for it, and only there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np

PROMPT = "The quick brown fox jumps"


@dataclass(frozen=True)
class Attention:
    """Who looks where.

    Attributes:
        ids: the prompt's tokens.
        patterns: [layers, heads, tokens, tokens]; each row sums to one.
    """

    ids: list[int]
    patterns: np.ndarray


def run(model: Any) -> Attention:
    """Read the pattern of every layer."""
    ids = model.tokenizer.encode(PROMPT)
    with model.trace(ids, max_tokens=1):
        patterns = [block.attn.pattern.clone() for block in model.blocks].save()
    return Attention(ids, np.stack([experiment.as_array(pattern) for pattern in patterns]))


def draw(model: Any, found: Attention, picture: Path) -> None:
    """Write a small square for each head of each layer."""
    layers, heads, count, _ = found.patterns.shape
    labels = experiment.tokens_of(model, found.ids)
    size = 1.0 + 0.16 * count
    figure, axes = plt.subplots(
        layers, heads, figsize=(1.4 + size * heads, 1.2 + size * layers), squeeze=False, sharex=True, sharey=True
    )
    for (layer, head), axis in np.ndenumerate(axes):
        image = axis.imshow(found.patterns[layer, head], cmap="viridis", vmin=0, vmax=1)
        axis.set_title(f"layer {layer}, head {head}", fontsize=9)
        axis.set_xticks(range(count), labels, rotation=90, fontsize=6, family="monospace")
        axis.set_yticks(range(count), labels, fontsize=6, family="monospace")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="attention")
    experiment.save(figure, "Rows: the token that looks. Columns: the token that it looks at.", picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "attention.png")
