"""`python -m tests.fidelity [LAYOUT…]` measures layouts, all without names, and writes docs/fidelity.md; with `--columns COLUMN…`
only these architectures, with `--rows NAME…` only the rows that end with these names ("attn_in"), beside what the page has.

`python -m tests.fidelity --suite RESULT` measures what the test suite compares with that page, and writes it as JSON: layout →
column → row → condition → error or refusal.

`python -m tests.fidelity --checkpoint PATH` measures a checkpoint of the user's against transformers, and prints JSON: for each
location and condition the error or the refusal, the versions, and the command that measures it again. `--only LOCATION…` measures
these locations. The command fails if a value is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import ENVIRONMENT

if TYPE_CHECKING:
    from tests.fidelity import table


def main() -> None:
    """Measure; see the module's docstring."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # They read the environment when they are imported.
    from tests.fidelity import launch, suite, table
    from tests.fidelity.layouts import LAYOUTS, named
    from tests.fidelity.suite import columns_of

    parser = argparse.ArgumentParser("tests.fidelity", description="Measure, and write docs/fidelity.md.")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="as the page names it")
    parser.add_argument(
        "--columns", nargs="+", metavar="COLUMN", choices=columns_of(LAYOUTS[0]), help="as the page names them"
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", default=(), help="with which the rows end")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="measure this checkpoint, and print JSON")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="LOCATION", help="of the checkpoint, as its JSON names it"
    )
    parser.add_argument("--suite", type=Path, metavar="RESULT", help="measure what the test suite does, write it there")
    asked = parser.parse_args()
    if asked.checkpoint:
        sys.exit(_validate(asked.checkpoint, asked.only))
    with tempfile.TemporaryDirectory() as folder:
        if asked.suite:
            measured = launch.run(suite.suite(), Path(folder))
            asked.suite.write_text(json.dumps({layout.name: columns for layout, columns in measured.items()}))
            return
        written = table.page().read_text()
        said = table.parse(written)
        for layout in map(named, asked.layouts) if asked.layouts else LAYOUTS:
            job = suite.Job.whole(layout, asked.columns or (), asked.rows)
            if not job.columns:
                continue
            [columns] = launch.run([job], Path(folder)).values()
            made = {name: table.column(cells) for name, cells in columns.items()}
            before = said.get(layout, {})
            if asked.rows:
                made = {name: table.added(before[name], one) for name, one in made.items()}
            now = before | made
            said[layout] = {name: now[name] for name in columns_of(layout) if name in now}
            if _complete(said):  # a new column is there when all its layouts have it
                in_order = {one: said[one] for one in LAYOUTS if one in said}
                table.page().write_text(table.render(in_order, suite.described(), written))
    if not _complete(said):
        sys.exit("docs/fidelity.md is as it was: measure a new column in every layout that has it, in one call")


def _complete(said: table.Page) -> bool:
    from tests.fidelity.suite import columns_of

    return all(list(columns) == columns_of(layout) for layout, columns in said.items())


def _validate(checkpoint: Path, only: Sequence[str]) -> int | str:
    """Measure a checkpoint and print what was found; return the exit code, or why nothing was measured."""
    from tests.fidelity.checkpoint import NotMeasured, report

    shown, sys.stdout = sys.stdout, sys.stderr  # what the engine prints is no JSON
    try:
        found = report(checkpoint.resolve(), only)
    except NotMeasured as why:
        return str(why)
    finally:
        sys.stdout = shown
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    main()
