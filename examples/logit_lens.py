"""A logit lens: what would each layer predict if it were the last layer?

    python examples/logit_lens.py --address localhost:9000

The block applies the final norm and the unembedding to the residual stream after each layer. It saves the likeliest token at
each position with its probability. It also saves how the model's answer climbs: its rank and its probability after each layer,
at the last token. (nostalgebraist, 2020)
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

PROMPT = "The Eiffel Tower is in"

CAPTION = (
    "Rows: the residual stream after each layer. Columns: the prompt. In each cell: the likeliest next token, "
    "coloured by its probability. Right: the model's answer at the last token."
)
COMPARED = " Frames: the edit changed the prediction."


@dataclass(frozen=True)
class Lens:
    """What every layer predicts.

    Attributes:
        prompt: its token ids.
        answer: the token whose climb is shown.
        ids, probabilities: [layers, tokens], of the likeliest token at every position.
        ranks: [layers], of the answer at the last position; 1: the likeliest.
        climb: [layers], the answer's probability there.
    """

    prompt: list[int]
    answer: int
    ids: np.ndarray
    probabilities: np.ndarray
    ranks: np.ndarray
    climb: np.ndarray


def lens_of(prompt: list[int], answer: int, best: Sequence[Any], climb: Sequence[Any]) -> Lens:
    """Return a lens from what a block saved.

    Args:
        prompt: its token ids.
        answer: a token id.
        best: (ids, probabilities), [tokens] each, for each layer.
        climb: (rank, probability) of the answer for each layer.
    """
    ids, probabilities = (np.stack([experiment.as_array(one[which]) for one in best]) for which in (0, 1))
    ranks, climbs = experiment.as_array(climb).T
    return Lens(prompt, answer, ids.astype(int), probabilities, ranks, climbs)


def run(model: Any, prompt: str = PROMPT) -> Lens:
    """Look through the lens at one prompt."""
    ids = experiment.encode(model, prompt)
    with model.trace(ids, max_tokens=1, temperature=0.0):
        best, last = [].save(), []
        for block in model.blocks:
            scores = model.unembed(model.final_norm(block.resid_post)).float()
            top = scores.softmax(-1).max(-1)
            best.append((top.indices, top.values))
            last.append(scores[-1])
        answer = int(model.logits.output[0].argmax()).save()
        climb = [(int((row > row[answer]).sum()) + 1, float(row.softmax(-1)[answer])) for row in last].save()
    return lens_of(ids, answer, best, climb)


def draw(model: Any, found: Lens, picture: Path) -> None:
    """Write the heat map of one prompt, and how the answer climbs."""
    draw_panels({"what each layer would say": found}, lambda token: experiment.decode(model, token), picture)


def draw_panels(panels: dict[str, Lens], decode: Callable[[int], str], picture: Path) -> None:
    """Write the heat maps side by side, and the climbs of the answer, to a PNG file.

    Args:
        panels: the lenses by title, of the same prompt and the same answer; later ones are compared with the first.
        decode: gives the text of a token id.
        picture: the file to write.
    """
    first = next(iter(panels.values()))
    layers, positions = first.ids.shape
    room = (pictures.WIDEST - 4.6) / len(panels)
    cells = pictures.Cells.fit(layers, positions, within=(min(room, 0.8 * positions + 0.6), 9.5))
    wide, high = cells.size
    figure = pictures.figure(len(panels) * (wide + 0.25) + 4.4, high + 1.5)
    axes = figure.subplots(1, len(panels) + 2, sharey=True, width_ratios=[*[wide] * len(panels), 1.3, 1.3])
    brightest = max(float(lens.probabilities.max()) for lens in panels.values())
    rows, columns = pictures.layer_labels(layers), [pictures.shown(decode(token)) for token in first.prompt]
    for axis, (title, lens) in zip(axes, panels.items(), strict=False):
        image = axis.imshow(
            lens.probabilities, origin="lower", aspect="auto", interpolation="nearest", vmin=0, vmax=brightest
        )
        axis.set_title(title, loc="left", fontsize=10)
        pictures.label_axes(axis, cells, rows, columns)
        texts = [[pictures.shown(decode(int(token))) for token in row] for row in lens.ids]
        pictures.write_texts(axis, cells, image, texts, marked=lens.ids != first.ids)
    figure.colorbar(
        image, ax=list(axes[: len(panels)]), label="probability", fraction=0.03, pad=0.01, aspect=high / 0.15
    )
    _draw_climb(axes[-2:], panels, pictures.shown(decode(first.answer)))
    pictures.save(figure, CAPTION + (COMPARED if len(panels) > 1 else ""), picture)


def _draw_climb(axes: Any, panels: dict[str, Lens], answer: str) -> None:
    """Draw the answer's rank and its probability over the layers, on the heat maps' rows."""
    rank, probability = axes
    for number, (title, lens) in enumerate(panels.items()):
        style = {"color": f"C{number}", "linewidth": 1.4, "linestyle": "--" if number else "-"}
        style["label"] = textwrap.fill(title, 16)
        layers = np.arange(len(lens.ranks))
        rank.plot(lens.ranks, layers, **style)
        probability.plot(lens.climb, layers, marker=".", markersize=4, **style)
    rank.set_xscale("log")
    rank.set_xlim(1.3 * max(lens.ranks.max() for lens in panels.values()), 0.8)
    rank.set_title(f"rank of “{answer}”", loc="left", fontsize=10)
    probability.set_xlim(-0.05, 1.05)
    probability.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    probability.set_title("its probability", loc="left", fontsize=10)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.tick_params(axis="x", labelsize=8)
    if len(panels) > 1:
        rank.legend(loc="lower left", fontsize=6.5, handlelength=1.4, borderaxespad=0.3)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "logit-lens.png", {"prompt": PROMPT})
