"""What the experiments share: the command line, a direction between two sets of prompts, how numbers become a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files; needs no screen

import matplotlib.pyplot as plt
import numpy as np

import interpose

Run = Callable[[Any], Any]
Draw = Callable[[Any, Any, Path], None]


def main(doc: str | None, run: Run, draw: Draw, picture: str, argv: Sequence[str] | None = None) -> None:
    """Connect, run one experiment on the served model, and draw what it found.

    Args:
        doc: the experiment's docstring; its first line is the command's description.
        run: the experiment; gets the model.
        draw: gets the model, what `run` returned, and the file to write.
        picture: the file's name unless the command line gives one.
        argv: the command line, without the program.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--address", default="localhost:9000", help="of the service")
    parser.add_argument("--model", help="name of the served model, if there are several")
    parser.add_argument("--picture", type=Path, default=Path(picture), help="the PNG file to write")
    args = parser.parse_args(argv)
    with interpose.connect(args.address) as client:
        model = client.model(args.model)
        draw(model, run(model), args.picture)
    print("picture:", args.picture)


def difference_of_means(model: Any, layer: int, towards: Sequence[str], away: Sequence[str]) -> Any:
    """Return the mean activation after a layer at the last token over one set of prompts, less that over another, [hidden]."""
    with model.trace(max_tokens=1) as tracer:
        last = [[], []].save()
        for which, prompts in enumerate((towards, away)):
            for prompt in prompts:
                with tracer.invoke(prompt):
                    last[which].append(model.blocks[layer].resid_post[-1])
    one, other = (sum(activations) / len(activations) for activations in last)
    return one - other


def as_array(values: Any) -> np.ndarray:
    """Return nested lists of numbers, or arrays of any library, as one float array."""
    return np.asarray(values, dtype=np.float64)


def shown(token: str) -> str:
    """Return a token with its blanks made visible, short enough for a label, and safe from being read as mathematics."""
    visible = token.replace(" ", "·").replace("\n", "↵").replace("$", r"\$")
    return visible if len(visible) <= 9 else visible[:8] + "…"


def tokens_of(model: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's text as a label."""
    return [shown(model.tokenizer.decode([token])) for token in ids]


def heat_map(
    axis: Any, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str, *, diverging: bool = True
) -> Any:
    """Draw a table with its numbers in the cells.

    Args:
        axis: of matplotlib.
        values: [rows, columns].
        rows: labels, from the bottom up.
        columns: labels.
        title: above the table.
        diverging: zero is white and the sign has a colour; otherwise colours go from small to large.

    Returns:
        matplotlib's image, for a colour bar.
    """
    bound = float(np.abs(values).max()) or 1.0
    limits = {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound} if diverging else {"cmap": "viridis"}
    image = axis.imshow(values, origin="lower", aspect="auto", **limits)
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xticks(range(len(columns)), columns, rotation=45 if len(columns) > 8 else 0, family="monospace")
    if values.size <= 150:
        for row, column in np.ndindex(*values.shape):
            red, green, blue, _ = image.cmap(image.norm(values[row, column]))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axis.text(
                column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
    return image


def save(figure: Any, caption: str, picture: Path) -> None:
    """Write a figure with a caption below it."""
    figure.text(0.01, 0.01, caption, fontsize=8, va="bottom")
    figure.savefig(picture, dpi=130)
    plt.close(figure)
