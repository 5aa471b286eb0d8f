"""Writes the table of `benchmarks.peers` into a page.

`python -m benchmarks.peers_table RESULTS PAGE` reads the JSON file that the benchmark wrote, and puts its table between the two
marks of the page. A library that is faster than this system stands in the table as every other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import between
from benchmarks.peers import CASES

BEGIN = "<!-- table: python -m benchmarks.peers_table -->"
COLUMNS = ("control", "stock eager", "interpose", "nnsight-taps", "nnsight", "vllm-lens")


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table in Markdown: a line for each case, a column for each engine.

    A cell has the ratio to stock vLLM, and the quartiles of the rounds' ratios.

    Args:
        results: the benchmark's figures by case and engine.
    """
    lines = [f"| case | stock, ms/step | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for case in CASES:
        if (stock := results.get(f"{case}: stock")) is None:
            continue
        cells = [_cell(results.get(f"{case}: {column}")) for column in COLUMNS]
        lines.append(f"| {case} | {stock['ms/step']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return "not measured"
    return f"{figures['ratio']:.3g} ({figures['quartile 1']:.3g} to {figures['quartile 3']:.3g})"


def with_table(page: str, results: Mapping[str, Mapping[str, float]]) -> str:
    """Return a page with the table between its marks.

    Raises:
        ValueError: the page does not have both marks.
    """
    return between(page, BEGIN, table(results))


def main(source: str, target: str) -> None:
    """Write the table of a result file into a page."""
    read: dict[str, Any] = json.loads(Path(source).read_text())
    page = Path(target)
    page.write_text(with_table(page.read_text(), read["results"]["peers"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
