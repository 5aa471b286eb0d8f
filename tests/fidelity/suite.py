"""What is measured: everything for the page, and by the test suite as much as a test's time allows.

The suite measures two layouts whole. Of each other one it measures some columns, each under one scheduling: over these layouts
every architecture has its turn, and in those with several columns so has every scheduling, each alone and in company.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """

    layout: Layout
    columns: dict[str, Sequence[Scheduling]]

    @classmethod
    def whole(cls, layout: Layout, columns: Iterable[str] = COLUMNS) -> Job:
        """Everything, of all columns or of some."""
        return cls(layout, dict.fromkeys(columns, SCHEDULINGS))


def suite() -> list[Job]:
    """Return what the test suite measures."""
    jobs = [Job.whole(layout) for layout in WHOLE]
    for number, (layout, columns) in enumerate(PARTS.items()):
        turns = (SCHEDULINGS[(number + i) % len(SCHEDULINGS)] for i in range(len(columns)))
        jobs.append(Job(named(layout), {column: [turn] for column, turn in zip(columns, turns, strict=True)}))
    return jobs


def described() -> str:
    """Return what the test suite measures, as the page says it."""
    lines = [f"{' and '.join(layout.name for layout in WHOLE)}: everything"]
    for job in suite()[len(WHOLE) :]:
        lines.append(
            f"{job.layout.name}: " + "; ".join(f"{name} ({turn.name})" for name, [turn] in job.columns.items())
        )
    return "\n".join(f"- {line}" for line in lines)
