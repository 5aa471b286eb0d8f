"""Writes the table of `docs/tiers.md`: `python -m tests.unit.executor.plan.tiers_page`.

The table has the reasons for which a text is no plan.
"""

from __future__ import annotations

from pathlib import Path

from executor.plan.refuse import ATTRIBUTES, BUILTINS, STATEMENTS

PAGE = Path(__file__).parents[4] / "docs" / "tiers.md"
BEGIN = "<!-- table: python -m tests.unit.executor.plan.tiers_page -->\n"
END = "<!-- end of the table -->\n"

# How a statement is written, by the name of its class in `ast`.
WRITTEN = {
    "While": "while",
    "Try": "try",
    "TryStar": "except*",
    "Raise": "raise",
    "ClassDef": "class",
    "Import": "import",
    "ImportFrom": "from … import",
    "Global": "global",
    "Nonlocal": "nonlocal",
    "Delete": "del",
    "AsyncFor": "async for",
    "AsyncWith": "async with",
    "AsyncFunctionDef": "async def",
    "Await": "await",
    "Yield": "yield",
    "YieldFrom": "yield from",
    "With": "with",
    "Match": "match",
}


def table() -> str:
    """Return the table: what stands in a loop, why it keeps the loop from being a plan, and what to write instead."""
    found: dict[tuple[str, str], list[str]] = {}
    for names, written in (
        (STATEMENTS, lambda name: WRITTEN[name]),
        (ATTRIBUTES, lambda name: f".{name}"),
        (BUILTINS, lambda name: f"{name}()"),
    ):
        for name, reason in names.items():
            found.setdefault(reason, []).append(f"`{written(name)}`")
    rows = [f"| {', '.join(names)} | {why} | {instead} |" for (why, instead), names in found.items()]
    return "\n".join(["| in a loop | why it is no plan | instead |", "| --- | --- | --- |", *rows]) + "\n"


def page_with(made: str, page: str) -> str:
    """Return the page with a table in the place of its table."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + "\n" + made + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with(table(), PAGE.read_text()))
