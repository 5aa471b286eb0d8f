"""A logit lens: what each layer would predict if it were the last one (nostalgebraist, 2020).

The served model gives the residual stream; the final norm and `lm_head` are applied here, with weights read from the
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files; needs no screen

import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file

CAPTION = (
    "Rows: the residual stream after each layer, saved in the engine during prefill. Columns: the prompt. "
    "In each cell: the likeliest next token, coloured by its probability.\n"
    "The final norm and lm_head were applied in the client, with weights from the checkpoint. "
    "Boxes: the edit changed the prediction."
)


@dataclass(frozen=True)
class Lens:
    """What every layer predicts at every position: `ids` and `probabilities` are [layers, tokens]."""

    ids: np.ndarray
    probabilities: np.ndarray


def look(stream: Sequence[Any], checkpoint: Path) -> Lens:
    """Apply a llama's final norm and head to the residual stream after each layer.

    Args:
        stream: one [tokens, hidden] tensor for each layer.
        checkpoint: the directory with the model's weights.
    """
    weights = load_file(checkpoint / "model.safetensors")
    epsilon = json.loads((checkpoint / "config.json").read_text())["rms_norm_eps"]
    hidden = np.stack([np.asarray(layer) for layer in stream])  # [layers, tokens, hidden]
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + epsilon) * weights["model.norm.weight"]
    logits = normed @ weights["lm_head.weight"].T
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return Lens(probabilities.argmax(-1), probabilities.max(-1))


def draw(panels: dict[str, Lens], tokens: Sequence[str], decode: Callable[[int], str], picture: Path) -> None:
    """Write the heat maps of all panels, one below the other, to a PNG file.

    Args:
        panels: the lenses by title; later ones are compared with the first.
        tokens: the prompt's tokens as text.
        decode: gives the text of a token id.
        picture: the file to write.
    """
    first = next(iter(panels.values()))
    layers, positions = first.ids.shape
    brightest = max(float(lens.probabilities.max()) for lens in panels.values())
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(2.5 + 1.05 * positions, 1.6 + len(panels) * (1.0 + 0.42 * layers)), squeeze=False
    )
    for axis, (title, lens) in zip(axes[:, 0], panels.items(), strict=True):
        image = axis.imshow(lens.probabilities, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=brightest)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_yticks(range(layers), [f"layer {layer}" for layer in range(layers)])
        axis.set_xticks(range(positions), [visible(token) for token in tokens], family="monospace")
        for layer, position in np.ndindex(layers, positions):
            dark = lens.probabilities[layer, position] < 0.7 * brightest
            changed = lens.ids[layer, position] != first.ids[layer, position]
            axis.text(
                position,
                layer,
                visible(decode(int(lens.ids[layer, position]))),
                ha="center",
                va="center",
                family="monospace",
                fontsize=9,
                color="white" if dark else "black",
                bbox={"edgecolor": "orangered", "facecolor": "none", "linewidth": 1.2} if changed else None,
            )
    figure.subplots_adjust(left=0.09, right=0.9, top=0.94, bottom=0.14, hspace=0.4)
    figure.colorbar(image, ax=axes[:, 0].tolist(), label="probability", fraction=0.03, pad=0.02)
    figure.text(0.01, 0.01, CAPTION, fontsize=8, va="bottom")
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def visible(token: str) -> str:
    """Return a token with its blanks made visible, short enough for a cell, and safe from being read as mathematics."""
    shown = token.replace(" ", "·").replace("\n", "↵").replace("$", r"\$")
    return shown if len(shown) <= 9 else shown[:8] + "…"
