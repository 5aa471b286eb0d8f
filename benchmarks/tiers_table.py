"""Writes the table of `benchmarks.tiers` into a page.

`python -m benchmarks.tiers_table RESULTS… PAGE` reads the JSON files of one run or of several, say one for each model, and puts
their table between the two marks of the page. A later file wins over an earlier one. A row above its goal stands in the table as
every other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import between
from benchmarks.tier_rows import ROWS

BEGIN = "<!-- table: python -m benchmarks.tiers_table -->"
COLUMNS = (("1b", 1), ("1b", 32), ("8b", 1), ("8b", 32))
KINDS = {"interpose": "engine", "service": "service"}

Figures = Mapping[str, Mapping[str, float]]


def table(results: Figures) -> str:
    """Return the table in Markdown: a line for each row, a column for each model and batch size.

    A cell has the ratio to stock vLLM, the quartiles of the rounds' ratios, and the goal. A service's cell has the ratio to the
    engine too.

    Args:
        results: the benchmark's figures by case.
    """
    names = [f"{model.upper()}, batch {batch}" for model, batch in COLUMNS]
    lines = [f"| block | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for row in ROWS:
        for kind, shown in KINDS.items():
            found = [results.get(f"{model}, batch {batch}, {row}: {kind}") for model, batch in COLUMNS]
            if any(found):
                label = row if kind == "interpose" else f"{row}, {shown}"
                lines.append(f"| {label} | {' | '.join(map(_cell, found))} |")
    lines.append(f"| control | {' | '.join(_control(results, model, batch) for model, batch in COLUMNS)} |")
    return "\n".join(lines)


def _cell(figures: Mapping[str, float] | None) -> str:
    if not figures:
        return "not measured"
    cell = f"{figures['ratio']:.3g} ({figures['quartile 1']:.3g} to {figures['quartile 3']:.3g})"
    if "to engine" in figures:
        return f"{cell}; {figures['to engine']:.3g} of the engine"
    return f"{cell}; goal {figures['goal']:.3g}" if "goal" in figures else cell


def _control(results: Figures, model: str, batch: int) -> str:
    """Return the least and the greatest ratio of the second stock engine."""
    begin = f"{model}, batch {batch}, control"
    ratios = [figures["ratio"] for case, figures in results.items() if case.startswith(begin)]
    return f"{min(ratios):.3g} to {max(ratios):.3g}" if ratios else "not measured"


def with_table(page: str, results: Figures) -> str:
    """Return a page with the table between its marks.

    Raises:
        ValueError: the page does not have both marks.
    """
    return between(page, BEGIN, table(results))


def main(*arguments: str) -> None:
    """Write the table of some result files into a page."""
    *sources, target = arguments
    results: dict[str, Any] = {}
    for source in sources:
        results |= json.loads(Path(source).read_text())["results"]["tiers"]
    page = Path(target)
    page.write_text(with_table(page.read_text(), results))


if __name__ == "__main__":
    main(*sys.argv[1:])
