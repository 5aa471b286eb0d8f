"""Draws the result of `benchmarks.tier_scaling` for a page.

`python -m benchmarks.tier_plot RESULTS… PAGE` reads the JSON files of runs, draws a picture for each model beside the page, and
puts the pictures between the two marks of the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import between

BEGIN = "<!-- picture: python -m benchmarks.tier_plot -->"
NAME = re.compile(r"(\w+), (\d+) requests, (stock|control|capture \d+|steer \d+)")
COLOURS = {"stock": "#444444", "control": "#999999", "capture": "#1f77b4", "steer": "#d95f02"}
MARKERS = ("o", "s", "^", "D")

# By model and line: the milliseconds, and the ratio to stock, by the number of requests.
Lines = dict[str, dict[str, dict[int, tuple[float, float]]]]


def lines_of(results: Mapping[str, Mapping[str, float]]) -> Lines:
    """Return the lines of a result.

    Args:
        results: the benchmark's figures by case.
    """
    found: Lines = {}
    for case, figures in results.items():
        match = NAME.fullmatch(case)
        if match is None:
            continue
        model, requests, line = match.groups()
        points = found.setdefault(model, {}).setdefault(line, {})
        points[int(requests)] = figures["ms/step"], figures.get("ratio", 1.0)
    return found


def label(line: str) -> str:
    """Return what the legend calls a line."""
    kind, _, count = line.partition(" ")
    names = {"stock": "stock vLLM, no block", "control": "a second stock vLLM"}
    return names.get(kind) or f"{kind} {count} layer{'s' if count != '1' else ''}"


def draw(lines: Mapping[str, Mapping[int, tuple[float, float]]], title: str, target: Path) -> None:
    """Draw one model's lines: a step's time on the left, the ratio to stock on the right.

    Args:
        lines: the lines of one model.
        title: stands above the picture.
        target: the SVG file.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws to files; needs no screen
    matplotlib.rcParams["svg.hashsalt"] = "interpose"  # the same result gives the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    counts = sorted({count for points in lines.values() for count in points})
    seen: dict[str, int] = {}
    for line, points in lines.items():
        kind = line.partition(" ")[0]
        number = seen[kind] = seen.get(kind, -1) + 1
        style = {"color": COLOURS[kind], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        style |= {"linestyle": "--"} if kind in ("stock", "control") else {"alpha": 1 - 0.25 * number}
        for axis, part in zip(axes, (0, 1), strict=True):
            axis.plot(list(points), [point[part] for point in points.values()], label=label(line), **style)
    for axis, name in zip(axes, ("ms of a typical step", "ratio to stock vLLM"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="requests, all with a block", ylabel=name)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        low, high = axis.get_ylim()
        ticks = [tick for tick in (0.5, 1, 1.1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)


def with_pictures(page: str, names: Mapping[str, str]) -> str:
    """Return a page with the pictures between its marks.

    Args:
        page: the page's text.
        names: the pictures' files by the text that stands for each.

    Raises:
        ValueError: the page does not have both marks.
    """
    body = "\n\n".join(f"![{text}]({file})" for text, file in names.items())
    return between(page, BEGIN, body)


def main(*arguments: str) -> None:
    """Draw the results of some files beside a page, and show the pictures there."""
    *sources, target = arguments
    results: dict[str, Any] = {}
    for source in sources:
        results |= json.loads(Path(source).read_text())["results"]["tier_scaling"]
    page = Path(target)
    names: dict[str, str] = {}
    for model, lines in lines_of(results).items():
        title = f"What a step costs by requests and layers, {model.upper()}"
        names[title] = f"tier-scaling-{model}.svg"
        draw(lines, title, page.with_name(names[title]))
    page.write_text(with_pictures(page.read_text(), names))


if __name__ == "__main__":
    main(*sys.argv[1:])
