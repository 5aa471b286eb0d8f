"""Draws numbers as pictures: tables that fit a page for any number of layers, and a caption.

A picture is at most `WIDEST` × `TALLEST` inches, whatever the model. With more layers, heads or tokens the cells are
smaller. Their texts get smaller and are left out where they are too small to read, and only every second, fifth, … row has a
label. A table is one image, so a picture takes seconds also for 80 layers.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError("pictures need matplotlib: pip install 'interpose[plots]'") from error

from interpose.contract.errors import InvalidArgument

WIDEST, TALLEST = 13.0, 12.0  # inches
DPI = 130
SMALLEST_TEXT, LARGEST_TEXT = 4.5, 9.0  # points
LABEL_HEIGHT = 0.15  # inches that a label beside a row takes
MONOSPACE = 0.61  # width of a character over its size
CAPTION_SIZE = 8.0  # points
STEPS = (1, 2, 5, 10, 20, 25, 50, 100)
SUFFIXES = (".png", ".svg", ".pdf")


class Picture(Figure):
    """A figure that a notebook shows, and that opens no window with any backend."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=DPI)
        return data.getvalue()


@dataclass(frozen=True)
class Cells:
    """A table's cells.

    Attributes:
        rows, columns: how many.
        width, height: of one of them, in inches.
    """

    rows: int
    columns: int
    width: float
    height: float

    @classmethod
    def fit(cls, rows: int, columns: int, *, within: tuple[float, float] = (9.0, 9.5), least: float = 2.4) -> Cells:
        """Return cells of a comfortable size, or smaller ones if so many would not fit.

        Args:
            rows, columns: how many.
            within: inches that the table may be wide and high.
            least: inches that it is wide and high at least.
        """
        wide = min(max(0.85 * columns, least), within[0])
        high = min(max(0.28 * rows, least), within[1])
        return cls(rows, columns, wide / columns, high / rows)

    @property
    def size(self) -> tuple[float, float]:
        """The table's width and height, in inches."""
        return self.width * self.columns, self.height * self.rows

    def text_size(self, characters: int) -> float:
        """Return the size, in points, of a text that fits a cell; 0 if it is too small to read."""
        fits = min(72 * 0.7 * self.height, 72 * 0.92 * self.width / (MONOSPACE * max(characters, 1)), LARGEST_TEXT)
        return fits if fits >= SMALLEST_TEXT else 0.0


def figure(width: float, height: float) -> Any:
    """Return a figure of up to the largest size, in inches.

    Labels, colour bars and the caption find their own room in the figure.
    """
    made = Picture(figsize=(min(width, WIDEST), min(height, TALLEST)), layout="constrained")
    FigureCanvasAgg(made)
    return made


def shown(token: str, most: int = 9) -> str:
    """Return a token's text as a short label with visible blanks and an escaped `$`."""
    visible = token if len(token) <= most else token[: most - 1] + "…"
    return visible.replace(" ", "·").replace("$", r"\$")


def labels(tokens: Sequence[str]) -> list[str]:
    """Return each token's text as a label."""
    return [shown(token) for token in tokens]


def prose(tokens: Sequence[str], most: int = 60) -> str:
    """Return tokens as one text with an escaped `$`; a long text loses its beginning."""
    text = "".join(tokens)
    return (text if len(text) <= most else "…" + text[1 - most :]).replace("$", r"\$")


def every(count: int, room: float, needed: float = LABEL_HEIGHT) -> list[int]:
    """Return the indices of the labels that are shown: all, or every second, fifth, …

    Args:
        count: the number of labels.
        room, needed: inches that each label has, and needs.
    """
    step = next((step for step in STEPS if step * room >= needed), max(STEPS[-1], count))
    return list(range(0, count, step))


def label_axes(axis: Any, cells: Cells, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Put labels on a table's rows and columns, as many as there is room for."""
    longest = max((len(part) for label in columns for part in label.split("\n")), default=1)
    size = 8.0
    needed = MONOSPACE * size * longest / 72 + 0.06
    upright = needed > cells.width
    at = every(len(columns), cells.width, LABEL_HEIGHT if upright else needed)
    axis.set_xticks(at, [columns[i] for i in at], rotation=90 if upright else 0, family="monospace", fontsize=size)
    at = every(len(rows), cells.height)
    axis.set_yticks(at, [rows[i] for i in at], fontsize=size)


def write_texts(axis: Any, cells: Cells, image: Any, texts: Sequence[Sequence[str]], *, marked: Any = None) -> None:
    """Write a text into each cell of a table, dark on light or light on dark, if it is readable.

    Args:
        axis: the table's.
        cells: the table's.
        image: the table's, whose colours decide.
        texts: [rows][columns].
        marked: [rows, columns], which cells have a frame; None: none of them.
    """
    size = cells.text_size(max(len(text) for row in texts for text in row))
    colours = image.cmap(image.norm(image.get_array()))
    dark = colours[..., :3] @ (0.3, 0.59, 0.11) < 0.5
    for row, column in np.ndindex(cells.rows, cells.columns):
        if size:
            axis.text(
                column, row, texts[row][column], ha="center", va="center", family="monospace", fontsize=size,
                color="white" if dark[row, column] else "black",
            )  # fmt: skip
        if marked is not None and marked[row, column]:
            frame = Rectangle((column - 0.46, row - 0.42), 0.92, 0.84, fill=False, edgecolor="orangered", linewidth=0.9)
            axis.add_patch(frame)


def heat_map(
    axis: Any,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    *,
    cells: Cells,
    xlabel: str = "token",
    ylabel: str = "layer",
    diverging: bool = True,
) -> Any:
    """Draw a table of numbers, which stand in the cells where they can be read.

    Args:
        axis: of matplotlib.
        values: [rows, columns].
        rows: labels, from the bottom up.
        columns: labels.
        title: above the table.
        cells: how large the cells are.
        xlabel, ylabel: of the axes.
        diverging: zero is white and the sign has a colour; otherwise colours go from small to large.

    Returns:
        matplotlib's image, for a colour bar.
    """
    bound = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    limits = {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound} if diverging else {"cmap": "viridis"}
    image = axis.imshow(values, origin="lower", aspect="auto", interpolation="nearest", **limits)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.set_title(title, loc="left", fontsize=11)
    label_axes(axis, cells, rows, columns)
    write_texts(axis, cells, image, [["" if np.isnan(value) else f"{value:.2f}" for value in row] for row in values])
    return image


def table_figure(cells: Cells) -> tuple[Any, Any]:
    """Return a figure for one table, with room for labels and a caption, and the table's axis."""
    wide, high = cells.size
    made = figure(wide + 2.1, high + 1.4)
    return made, made.subplots()


def layer_labels(layers: Sequence[int]) -> list[str]:
    """Return the names of layers."""
    return [f"layer {layer}" for layer in layers]


def finish(figure: Any, caption: str, path: Any) -> Any:
    """Put a caption below a figure, write it if there is a path, and return it.

    Args:
        figure: of `figure`.
        caption: broken into lines that fit.
        path: a file: .png, .svg or .pdf; None: none is written.

    Raises:
        InvalidArgument: the file has another suffix.
    """
    across = int((figure.get_figwidth() - 0.2) * 72 / (0.5 * CAPTION_SIZE))
    text = "\n".join(textwrap.wrap(caption, across))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=CAPTION_SIZE)
    if path is not None:
        file = Path(path)
        if file.suffix.lower() not in SUFFIXES:
            raise InvalidArgument(
                f"a picture is a file with one of the suffixes {', '.join(SUFFIXES)}, not {file.name}"
            )
        figure.savefig(file, dpi=DPI)
    return figure
