"""`python -m tests.fidelity [LAYOUT…]` measures layouts, all without names, and writes docs/fidelity.md; with `--columns COLUMN…`
only these architectures, with `--rows NAME…` only the rows that end with these names ("attn_in"), beside what the page has.

`python -m tests.fidelity --suite RESULT` measures what the test suite compares with that page, and writes it as JSON: layout →
column → row → condition → error or refusal.

`python -m tests.fidelity [LAYOUT…] --try COLUMN…` measures architectures that the page need not have, under one scheduling, with
one rank if no layout is named. It prints the largest error or the refusal of each row, and fails if a value is wrong.

`python -m tests.fidelity [LAYOUT…] --checkpoint PATH` measures a checkpoint of the user's against transformers, and prints JSON:
for each location and condition the error or the refusal, the versions, and the command that measures it again. `--dtype bfloat16`
measures engines in that precision, `--only LOCATION…` these locations. A layout is "TP 3", "PP 2" or "TP 2 × PP 2"; without one
it is "TP 1". The command fails if a value is wrong. `--record NAME` also writes what was found to docs/real-weights.md, under
that name of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.layouts import Layout
from tests import stand_ins
from tests.conftest import ENVIRONMENT

if TYPE_CHECKING:
    from tests.fidelity import launch, table


def main() -> None:
    """Measure; see the module's docstring."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stand_ins.use()
    # They read the environment when they are imported.
    from tests.fidelity import launch, suite, table
    from tests.fidelity.architectures import ALL
    from tests.fidelity.checkpoint import DTYPES
    from tests.fidelity.layouts import LAYOUTS
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
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the checkpoint's engines")
    parser.add_argument("--record", metavar="NAME", help="write what was found to docs/real-weights.md")
    parser.add_argument("--suite", type=Path, metavar="RESULT", help="measure what the test suite does, write it there")
    parser.add_argument(
        "--try", dest="tried", nargs="+", metavar="COLUMN", choices=list(ALL), help="measure, and print"
    )
    asked = parser.parse_args()
    if asked.checkpoint:
        sys.exit(_validate(asked))
    with tempfile.TemporaryDirectory() as folder:
        if asked.suite:
            measured = launch.run(suite.suite(), Path(folder))
            asked.suite.write_text(json.dumps({layout.name: columns for layout, columns in measured.items()}))
            return
        if asked.tried:
            tried = [suite.tried(layout, asked.tried) for layout in map(Layout.named, asked.layouts or ["TP 1"])]
            sys.exit(_print(launch.run(tried, Path(folder))))
        written = table.page().read_text()
        said = table.parse(written)
        for layout in map(Layout.named, asked.layouts) if asked.layouts else LAYOUTS:
            if layout not in LAYOUTS:
                parser.error(f"the page has no layout {layout.name}; it has {', '.join(one.name for one in LAYOUTS)}")
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


def _print(measured: launch.Measured) -> int:
    """Print what was measured, each row's largest error or its refusals; return the exit code."""
    from tests.fidelity.table import LARGEST

    wrong = 0
    for layout, columns in measured.items():
        for name, cells in columns.items():
            print(f"{name}, {layout.name}")
            for row, conditions in cells.items():
                errors = [one for one in conditions.values() if isinstance(one, float)]
                said = [*dict.fromkeys(one for one in conditions.values() if isinstance(one, str))]
                if errors:
                    said.insert(0, f"{max(errors):.0e}")
                bad = max(errors, default=0.0) > LARGEST or len(said) > 1
                wrong += bad
                print(f"  {'WRONG ' if bad else ''}{row}: {' or '.join(said)}")
    return int(wrong > 0)


def _validate(asked: argparse.Namespace) -> int | str:
    """Measure a checkpoint and print what was found; return the exit code, or why nothing was measured."""
    from tests.fidelity import real
    from tests.fidelity.checkpoint import NotMeasured, report
    from tests.fidelity.layouts import ONE_RANK

    shown, sys.stdout = sys.stdout, sys.stderr  # what the engine prints is no JSON
    try:
        layouts = [Layout.named(name) for name in asked.layouts] or [ONE_RANK]
        found = report(asked.checkpoint.resolve(), asked.only, layouts, asked.dtype)
    except (NotMeasured, ValueError) as why:
        return str(why)
    finally:
        sys.stdout = shown
    print(json.dumps(found, indent=1))
    if asked.record:
        real.record(asked.record, found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    main()
