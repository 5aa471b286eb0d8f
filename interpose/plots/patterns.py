"""The picture of attention patterns: a small square for each head of each layer.

Where circuitsvis is installed, a notebook shows the squares with circuitsvis instead: a click makes one large, and the numbers
are under the mouse.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from interpose.plots import figures
from interpose.verbs.heads import Attention

LAYERS, HEADS = 8, 12  # shown at most


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


class Squares:
    """Attention patterns that a notebook shows with circuitsvis; `save` writes them as a page.

    Attributes:
        html: the patterns with all that shows them; nothing is loaded from elsewhere.
    """

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: Any) -> None:
        """Write a page that a browser opens."""
        page = f'<!doctype html>\n<meta charset="utf-8">\n<title>attention patterns</title>\n{self.html}\n'
        Path(path).write_text(page, encoding="utf-8")


def attention(found: Attention, path: Any = None, *, interactive: bool | None = None) -> Any:
    """Draw at most 8 layers and 12 heads of each, evenly spread.

    Args:
        found: the patterns.
        path: a file to write: .png, .svg, .pdf, or .html for a page with circuitsvis; None: none is written.
        interactive: whether circuitsvis shows the patterns; None: it does if it is installed and the file is no picture.

    Returns:
        A figure of matplotlib, or `Squares`.

    Raises:
        ImportError: circuitsvis is asked for and is not installed.
    """
    suffix = Path(path).suffix.lower() if path is not None else ""
    if interactive is None:
        interactive = suffix == ".html" or (path is None and _circuitsvis() is not None)
    layers, heads = (spread(count, shown) for count, shown in zip(found.patterns.shape, (LAYERS, HEADS), strict=False))
    chosen = found.patterns[np.ix_(layers, heads)]
    if interactive:
        names = [f"L{found.layers[layer]} H{head}" for layer in layers for head in heads]
        shown = _squares(chosen.reshape(-1, *chosen.shape[2:]), found.tokens, names)
        if path is not None:
            shown.save(path)
        return shown
    count = len(found.ids)
    side = min(1.3, 9.6 / len(heads), 8.6 / len(layers))  # inches of a square
    figure = figures.figure(side * len(heads) + 3.0, side * len(layers) + 2.3)
    axis = figure.subplots()
    image = axis.imshow(mosaic(chosen), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    starts = [at * (count + 1) for at in range(max(len(layers), len(heads)))]
    labels = figures.labels(found.tokens)
    at = figures.every(count, side / (count + 1), 0.11)
    beside = [(start + i, labels[i]) for start in starts for i in at]
    for axis_of, squares_there in ((axis.xaxis, len(heads)), (axis.yaxis, len(layers))):
        ticks = beside[: squares_there * len(at)]
        axis_of.set_ticks([tick for tick, _ in ticks], [label for _, label in ticks], family="monospace", fontsize=6)
        axis_of.set_tick_params(length=1.5)
    axis.tick_params(axis="x", rotation=90)
    axis.set_xlabel("token that is looked at")
    axis.set_ylabel("token that looks")
    above, right = axis.secondary_xaxis("top"), axis.secondary_yaxis("right")
    middle = (count - 1) / 2
    above.set_xticks([start + middle for start in starts[: len(heads)]], [f"head {head}" for head in heads], fontsize=8)
    named = figures.layer_labels([found.layers[one] for one in layers])
    right.set_yticks([start + middle for start in starts[: len(layers)]], named, fontsize=8)
    for edge in (above, right):
        edge.tick_params(length=0)
        edge.spines[:].set_visible(False)
    axis.spines[:].set_visible(False)
    figure.colorbar(image, ax=axis, label="attention probability", aspect=40)
    counts = found.patterns.shape[:2]
    some = (
        ""
        if chosen.shape[:2] == counts
        else f" Shown: {len(layers)} of {counts[0]} layers, {len(heads)} of {counts[1]} heads."
    )
    return figures.finish(figure, f"Each row of a square sums to one.{some}", path)


def _squares(patterns: np.ndarray, tokens: tuple[str, ...], names: list[str]) -> Squares:
    """Return patterns for circuitsvis.

    Args:
        patterns: [heads, tokens, tokens].
        tokens: their texts.
        names: of the heads.
    """
    circuitsvis = _circuitsvis()
    if circuitsvis is None:
        raise ImportError("attention patterns that answer to the mouse need circuitsvis: pip install circuitsvis")
    texts = [_MARKUP.sub("‹", token) for token in tokens]
    drawn = circuitsvis.attention_heads(
        patterns.round(4), texts, attention_head_names=names, max_value=1.0, min_value=0.0, mask_upper_tri=True
    )
    # Its own HTML for a notebook asks for a connection first, and loads the code from elsewhere; it leaves an element open.
    return Squares(f"<div>{drawn.local_src}</div></div>")


def _circuitsvis() -> Any:
    """Return the module of circuitsvis that shows attention; None: it cannot be imported."""
    try:
        return importlib.import_module("circuitsvis.attention")
    except ImportError:
        return None


# The beginning of a tag that would end or hide the script with the texts.
_MARKUP = re.compile(r"<(?=/|!|script)", re.IGNORECASE)
