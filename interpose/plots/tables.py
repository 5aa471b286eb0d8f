"""Pictures that are tables: a row for each layer or prompt, a column for each token or head."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from interpose.plots import figures
from interpose.verbs.heads import HeadAblation
from interpose.verbs.lenses import Lens
from interpose.verbs.patching import PatchSweep
from interpose.verbs.probing import ProbeScores

CAPTION = (
    "Rows: the residual stream after each layer. Columns: the prompt. In each cell: the likeliest next token, "
    "coloured by its probability. Right: the model's answer at the last token."
)
COMPARED = " Frames: the edit changed the prediction."


def lens(found: Lens, path: Any = None, *, title: str = "what each layer would say") -> Any:
    """Draw the heat map of a lens, and how the answer climbs."""
    return lenses({title: found}, path)


def lenses(panels: Mapping[str, Lens], path: Any = None) -> Any:
    """Draw the heat maps of lenses side by side, and the climbs of the answer.

    Args:
        panels: the lenses by title, of the same prompt, layers and answer; the later ones are compared with the first.
        path: the file to write; None: none is written.
    """
    first = next(iter(panels.values()))
    layers, positions = first.ids.shape
    room = (figures.WIDEST - 5.2) / len(panels)
    cells = figures.Cells.fit(layers, positions, within=(min(room, 0.8 * positions + 0.6), 9.5))
    wide, high = cells.size
    figure = figures.figure(len(panels) * (wide + 0.25) + 5.0, high + 1.7)
    axes = figure.subplots(1, len(panels) + 2, sharey=True, width_ratios=[*[wide] * len(panels), 1.3, 1.3])
    brightest = max(float(one.probabilities.max()) for one in panels.values())
    rows, columns = figures.layer_labels(first.layers), figures.labels(first.tokens)
    for axis, (title, one) in zip(axes, panels.items(), strict=False):
        image = axis.imshow(
            one.probabilities, origin="lower", aspect="auto", interpolation="nearest", vmin=0, vmax=brightest
        )
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("token")
        figures.label_axes(axis, cells, rows, columns)
        texts = [figures.labels(row) for row in one.texts]
        figures.write_texts(axis, cells, image, texts, marked=one.ids != first.ids)
    axes[0].set_ylabel("after layer")
    figure.colorbar(
        image, ax=list(axes[: len(panels)]), label="probability", fraction=0.03, pad=0.01, aspect=high / 0.15
    )
    _draw_climb(axes[-2:], panels, figures.shown(first.answer_text))
    return figures.finish(figure, CAPTION + (COMPARED if len(panels) > 1 else ""), path)


def _draw_climb(axes: Any, panels: Mapping[str, Lens], answer: str) -> None:
    """Draw the answer's rank and its probability over the layers, on the heat maps' rows."""
    rank, probability = axes
    for number, (title, one) in enumerate(panels.items()):
        style: dict[str, Any] = {"color": f"C{number}", "linewidth": 1.4, "linestyle": "--" if number else "-"}
        style["label"] = textwrap.fill(title, 16)
        rows = np.arange(len(one.ranks))
        rank.plot(one.ranks, rows, **style)
        probability.plot(one.climb, rows, marker=".", markersize=4, **style)
    rank.set_xscale("log")
    rank.set_xlim(1.3 * max(one.ranks.max() for one in panels.values()), 0.8)
    rank.set_title(f"“{answer}”", loc="left", fontsize=10)
    rank.set_xlabel("rank")
    probability.set_xlim(-0.05, 1.05)
    probability.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    probability.set_xlabel("probability")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.tick_params(axis="x", labelsize=8)
    if len(panels) > 1:
        rank.legend(loc="lower left", fontsize=6.5, handlelength=1.4, borderaxespad=0.3)


def patch_sweep(found: PatchSweep, path: Any = None) -> Any:
    """Draw the shares of a patch sweep as a heat map of layers and tokens."""
    pairs = zip(found.clean_tokens, found.corrupted_tokens, found.clean, found.corrupted, strict=True)
    labels = [
        figures.shown(one) if same == as_well else f"{figures.shown(one)}\n→{figures.shown(other)}"
        for one, other, same, as_well in pairs
    ]
    first, second = figures.labels(found.answer_texts)
    cells = figures.Cells.fit(*found.share.shape)
    figure, axis = figures.table_figure(cells)
    rows = figures.layer_labels(range(len(found.share)))
    title = f"how much of “{first}” over “{second}” comes back"
    image = figures.heat_map(axis, found.share, rows, labels, title, cells=cells)
    figure.colorbar(image, ax=axis, label="share restored", aspect=40)
    caption = "Each cell: the residual stream after that layer, at that token, was taken from the other prompt."
    return figures.finish(figure, caption, path)


def head_ablation(found: HeadAblation, path: Any = None) -> Any:
    """Draw the changes as a heat map of layers and heads; of several prompts the mean."""
    change = found.change.mean(0)
    layers, heads = change.shape
    cells = figures.Cells.fit(layers, heads)
    figure, axis = figures.table_figure(cells)
    rows, columns = figures.layer_labels(range(layers)), [str(head) for head in range(heads)]
    if len(found.prompts) == 1:
        title = f"change of log p(“{figures.shown(found.answer_texts[0])}”) without the head"
        said = f"Prompt: “{figures.prose(found.tokens[0])}”."
    else:
        title, said = "mean change of log p(answer) without the head", f"{len(found.prompts)} prompts."
    image = figures.heat_map(axis, change, rows, columns, title, cells=cells, xlabel="head")
    figure.colorbar(image, ax=axis, label="nats", aspect=40)
    return figures.finish(figure, f"{said} Heads zeroed before the output projection, one at a time.", path)


def probe_scores(found: ProbeScores, path: Any = None) -> Any:
    """Draw a probe's score of each token: a row for each prompt, the token in each cell."""
    longest = max(len(scores) for scores in found.scores)
    values = np.full((len(found.scores), longest), np.nan)
    texts = [[""] * longest for _ in found.scores]
    for row, (scores, tokens) in enumerate(zip(found.scores, found.tokens, strict=True)):
        values[row, : len(scores)] = scores
        texts[row][: len(tokens)] = figures.labels(tokens)
    cells = figures.Cells.fit(*values.shape)
    figure, axis = figures.table_figure(cells)
    bound = float(np.nanmax(np.abs(values))) or 1.0
    image = axis.imshow(values, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-bound, vmax=bound)
    figures.label_axes(axis, cells, [str(row) for row in range(len(values))], [str(at) for at in range(longest)])
    figures.write_texts(axis, cells, image, texts)
    axis.set_xlabel("position")
    axis.set_ylabel("prompt")
    figure.colorbar(image, ax=axis, label="the probe's score", aspect=40)
    return figures.finish(figure, f"The probe reads the residual stream after layer {found.layer}.", path)
