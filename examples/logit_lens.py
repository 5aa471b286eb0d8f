"""A logit lens: what would each layer predict if it were the last one? (nostalgebraist, 2020)

    python examples/logit_lens.py --address localhost:9000

The final norm and the unembedding are applied in the engine, to the residual stream after each layer, whole whatever the
tensor-parallel size; only the best token of each place and its probability travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np

PROMPT = "The Eiffel Tower is in"

CAPTION = (
    "Rows: the residual stream after each layer. Columns: the prompt. In each cell: the likeliest next token, "
    "coloured by its probability."
)
COMPARED = " Boxes: the edit changed the prediction."


@dataclass(frozen=True)
class Lens:
    """What every layer predicts at every position: `ids` and `probabilities` are [layers, tokens]."""

    ids: np.ndarray
    probabilities: np.ndarray


def lens_of(best: Sequence[Any]) -> Lens:
    """Return a lens from what a block saved: (ids, probabilities), [tokens] each, for each layer."""
    return Lens(np.stack([np.asarray(ids) for ids, _ in best]), np.stack([np.asarray(top) for _, top in best]))


def run(model: Any) -> Lens:
    """Look through the lens at one prompt."""
    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        best = [].save()
        for block in model.blocks:
            top = model.unembed(model.final_norm(block.resid_post)).softmax(-1).max(-1)
            best.append((top.indices, top.values))
    return lens_of(best)


def draw(model: Any, found: Lens, picture: Path) -> None:
    """Write the heat map of one prompt."""

    def decode(token: int) -> str:
        text: str = model.tokenizer.decode([token])
        return text

    tokens = [decode(token) for token in model.tokenizer.encode(PROMPT)]
    draw_panels({PROMPT: found}, tokens, decode, picture)


def draw_panels(panels: dict[str, Lens], tokens: Sequence[str], decode: Callable[[int], str], picture: Path) -> None:
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
        axis.set_xticks(range(positions), [experiment.shown(token) for token in tokens], family="monospace")
        for layer, position in np.ndindex(layers, positions):
            dark = lens.probabilities[layer, position] < 0.7 * brightest
            changed = lens.ids[layer, position] != first.ids[layer, position]
            axis.text(
                position,
                layer,
                experiment.shown(decode(int(lens.ids[layer, position]))),
                ha="center",
                va="center",
                family="monospace",
                fontsize=9,
                color="white" if dark else "black",
                bbox={"edgecolor": "orangered", "facecolor": "none", "linewidth": 1.2} if changed else None,
            )
    figure.subplots_adjust(left=0.09, right=0.9, top=0.94, bottom=0.14, hspace=0.4)
    figure.colorbar(image, ax=axes[:, 0].tolist(), label="probability", fraction=0.03, pad=0.02)
    experiment.save(figure, CAPTION + (COMPARED if len(panels) > 1 else ""), picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "logit-lens.png")
