"""What is measured: everything for the page, and by the test suite as much as a test's time allows.

The suite measures two layouts whole, but light columns (`tests.fidelity.architectures`) under one scheduling each. Of each other
layout it measures some columns, each under one scheduling: over these layouts every architecture has its turn, and in those
with several columns so has every scheduling, each alone and in company.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.fidelity.architectures import LIGHT
from tests.fidelity.layouts import LAYOUTS, Layout, named
from tests.fidelity.measure import COLUMNS, SCHEDULINGS, Scheduling

WHOLE = LAYOUTS[:2]
PARTS = {
    "TP 4": ["llama", "llama, 1 k/v head", "gemma2", "qwen3_moe"],
    "PP 2": ["gpt2", "gemma3", "olmoe", "opt", "stablelm"],
    "TP 2 × PP 2": ["qwen2", "gptj", "qwen3", "cohere"],
    "TP 4 × PP 2": ["gpt2"],
}


@dataclass(frozen=True)
class Job:
    """What is measured in one layout.

    Attributes:
        layout: of the engines.
        columns: the columns, and the schedulings that each is measured under.
        rows: the names with which the measured rows end; all rows without a name.
    """

    layout: Layout
    columns: dict[str, Sequence[Scheduling]]
    rows: tuple[str, ...] = ()

    @classmethod
    def whole(cls, layout: Layout, columns: Iterable[str] = (), rows: Iterable[str] = ()) -> Job:
        """Everything that the page has of a layout; or some columns or rows of it."""
        chosen = [name for name in columns_of(layout) if not columns or name in columns]
        return cls(layout, dict.fromkeys(chosen, SCHEDULINGS), tuple(rows))


def columns_of(layout: Layout) -> list[str]:
    """Return the columns that the page has of a layout."""
    return [*COLUMNS, *(LIGHT if layout in WHOLE else ())]


def suite() -> list[Job]:
    """Return what the test suite measures."""
    light = list(LIGHT)
    jobs = []
    for number, layout in enumerate(WHOLE):
        turns = {name: [SCHEDULINGS[(number + i) % len(SCHEDULINGS)]] for i, name in enumerate(light)}
        jobs.append(Job(layout, dict.fromkeys(COLUMNS, SCHEDULINGS) | turns))
    for number, (name, columns) in enumerate(PARTS.items()):
        in_turn = (SCHEDULINGS[(number + i) % len(SCHEDULINGS)] for i in range(len(columns)))
        jobs.append(Job(named(name), {column: [turn] for column, turn in zip(columns, in_turn, strict=True)}))
    return jobs


def described() -> str:
    """Return what the test suite measures, as the page says it."""
    light = f"; of {', '.join(LIGHT)} canonical values under one scheduling each" if LIGHT else ""
    lines = [f"{' and '.join(layout.name for layout in WHOLE)}: everything{light}"]
    for job in suite()[len(WHOLE) :]:
        lines.append(
            f"{job.layout.name}: " + "; ".join(f"{name} ({turn.name})" for name, [turn] in job.columns.items())
        )
    return "\n".join(f"- {line}" for line in lines)
