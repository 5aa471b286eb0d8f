"""What is measured: everything for the page, and by the test suite as much as a test's time allows.

The suite measures every architecture under all four schedulings: two in the first layout, one in the second, and one in a further
layout, where some columns have their turns. In the first two layouts, and in the further layouts with several columns, every
scheduling has its turn, each alone and in company. Light columns (`tests.fidelity.architectures`) are measured in one of the
first two layouts, under one scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.layouts import Layout
from tests.fidelity.architectures import LIGHT
from tests.fidelity.layouts import LAYOUTS
from tests.fidelity.measure import COLUMNS, SCHEDULINGS, Scheduling

WHOLE = LAYOUTS[:2]
PARTS = {
    "TP 4": ["llama", "llama, 1 k/v head", "gemma2", "qwen3_moe"],
    "PP 2": ["gpt2", "gemma3", "olmoe", "opt", "stablelm"],
    "TP 2 × PP 2": ["qwen2", "gptj", "qwen3", "cohere"],
    "TP 4 × PP 2": ["gpt2"],
}
Turns = Sequence[Scheduling]


@dataclass(frozen=True)
class Job:
    """What is measured in one layout.

    Attributes:
        layout: of the engines.
        columns: the columns, and the schedulings that each is measured under.
        rows: the names with which the measured rows end; all rows without a name.
    """

    layout: Layout
    columns: dict[str, Turns]
    rows: tuple[str, ...] = ()

    @classmethod
    def whole(cls, layout: Layout, columns: Iterable[str] = (), rows: Iterable[str] = ()) -> Job:
        """Everything that the page has of a layout; or some columns or rows of it."""
        chosen = [name for name in columns_of(layout) if not columns or name in columns]
        return cls(layout, dict.fromkeys(chosen, SCHEDULINGS), tuple(rows))


def tried(layout: Layout, names: Iterable[str]) -> Job:
    """Return the measurement of some architectures under one scheduling."""
    return Job(layout, dict.fromkeys(names, SCHEDULINGS[-1:]))


def columns_of(layout: Layout) -> list[str]:
    """Return the columns that the page has of a layout."""
    return [*COLUMNS, *(LIGHT if layout in WHOLE else ())]


def suite() -> list[Job]:
    """Return what the test suite measures."""
    count = len(SCHEDULINGS)
    parts = [
        Job(Layout.named(name), {column: [SCHEDULINGS[(number + i) % count]] for i, column in enumerate(columns)})
        for number, (name, columns) in enumerate(PARTS.items())
    ]
    first, second = dict[str, Turns](), dict[str, Turns]()
    for name in COLUMNS:
        [turn] = next(job.columns[name] for job in parts if name in job.columns)
        opposite = Scheduling(not turn.chunked, not turn.cached)
        second[name] = [opposite]
        first[name] = [one for one in SCHEDULINGS if one not in (turn, opposite)]
    for i, name in enumerate(LIGHT):
        (first, second)[i % 2][name] = [SCHEDULINGS[i // 2 % count]]
    return [*(Job(layout, columns) for layout, columns in zip(WHOLE, (first, second), strict=True)), *parts]


def described() -> str:
    """Return what the test suite measures, as the page says it."""
    lines = []
    for job in suite():
        columns = (f"{name} ({' and '.join(turn.name for turn in turns)})" for name, turns in job.columns.items())
        lines.append(f"- {job.layout.name}: {'; '.join(columns)}")
    return "\n".join(lines)
