"""Attention patterns: which tokens does each head look at?

    python examples/attention.py --address localhost:9000

The engine's attention kernels keep no probabilities. The pattern is recomputed from the layer's own queries and keys
where a block asks for it, and only there. The picture shows at most 8 layers and 12 heads of each, evenly spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

PROMPT = "The quick brown fox jumps"
LAYERS, HEADS = 8, 12  # shown at most


@dataclass(frozen=True)
class Attention:
    """The attention pattern of each layer.

    Attributes:
        ids: the prompt's tokens.
        patterns: [layers, heads, tokens, tokens]; each row sums to one.
    """

    ids: list[int]
    patterns: np.ndarray


def run(model: Any, prompt: str = PROMPT) -> Attention:
    """Read the pattern of every layer."""
    ids = experiment.encode(model, prompt)
    with model.trace(ids, max_tokens=1):
        patterns = [block.attn.pattern.float().clone() for block in model.blocks].save()
    return Attention(ids, np.stack([experiment.as_array(pattern) for pattern in patterns]))


def spread(count: int, shown: int) -> list[int]:
    """Return up to `shown` of `count` indices, evenly spread, with the first and the last."""
    return sorted({round(at) for at in np.linspace(0, count - 1, min(count, shown))})


def mosaic(patterns: np.ndarray) -> np.ndarray:
    """Lay the patterns side by side in one array, with a gap of NaN after each.

    Args:
        patterns: [layers, heads, tokens, tokens].

    Returns:
        [layers * (tokens + 1) - 1, heads * (tokens + 1) - 1].
    """
    layers, heads, tokens, _ = patterns.shape
    padded = np.full((layers, heads, tokens + 1, tokens + 1), np.nan)
    padded[:, :, :tokens, :tokens] = patterns
    return padded.transpose(0, 2, 1, 3).reshape(layers * (tokens + 1), heads * (tokens + 1))[:-1, :-1]


def draw(model: Any, found: Attention, picture: Path) -> None:
    """Write one image with a small square for each head of each layer."""
    layers, heads = (spread(count, shown) for count, shown in zip(found.patterns.shape, (LAYERS, HEADS), strict=False))
    chosen = found.patterns[np.ix_(layers, heads)]
    count = len(found.ids)
    side = min(1.3, 10.0 / len(heads), 9.0 / len(layers))  # inches of a square
    figure = pictures.figure(side * len(heads) + 2.6, side * len(layers) + 1.9)
    axis = figure.subplots()
    image = axis.imshow(mosaic(chosen), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    starts = [at * (count + 1) for at in range(max(len(layers), len(heads)))]
    labels = experiment.labels_of(model, found.ids)
    at = pictures.every(count, side / (count + 1), 0.11)
    beside = [(start + i, labels[i]) for start in starts for i in at]
    for axis_of, squares_there in ((axis.xaxis, len(heads)), (axis.yaxis, len(layers))):
        ticks = beside[: squares_there * len(at)]
        axis_of.set_ticks([tick for tick, _ in ticks], [label for _, label in ticks], family="monospace", fontsize=6)
        axis_of.set_tick_params(length=1.5)
    axis.tick_params(axis="x", rotation=90)
    above, right = axis.secondary_xaxis("top"), axis.secondary_yaxis("right")
    middle = (count - 1) / 2
    above.set_xticks([start + middle for start in starts[: len(heads)]], [f"head {head}" for head in heads], fontsize=8)
    right.set_yticks(
        [start + middle for start in starts[: len(layers)]], [f"layer {one}" for one in layers], fontsize=8
    )
    for edge in (above, right):
        edge.tick_params(length=0)
        edge.spines[:].set_visible(False)
    axis.spines[:].set_visible(False)
    figure.colorbar(image, ax=axis, label="attention", aspect=40)
    counts = found.patterns.shape[:2]
    some = (
        ""
        if chosen.shape[:2] == counts
        else f" Shown: {len(layers)} of {counts[0]} layers, {len(heads)} of {counts[1]} heads."
    )
    pictures.save(figure, f"Rows: the token that looks. Columns: the token that it looks at.{some}", picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "attention.png", {"prompt": PROMPT})
