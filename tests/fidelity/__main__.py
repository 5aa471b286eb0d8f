"""`python -m tests.fidelity [LAYOUT…]` measures layouts, all without names, and writes docs/fidelity.md; with `--columns COLUMN…`
only these architectures.

`python -m tests.fidelity --suite RESULT` measures what the test suite compares with that page, and writes it as JSON: layout →
column → row → condition → error or refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.conftest import ENVIRONMENT


def main() -> None:
    """Measure; see the module's docstring."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # They read the environment when they are imported.
    from tests.fidelity import launch, suite, table
    from tests.fidelity.layouts import LAYOUTS, named
    from tests.fidelity.measure import COLUMNS

    parser = argparse.ArgumentParser("tests.fidelity", description="Measure, and write docs/fidelity.md.")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="as the page names it")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", choices=list(COLUMNS), help="as the page names them")
    parser.add_argument("--suite", type=Path, metavar="RESULT", help="measure what the test suite does, write it there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.suite:
            measured = launch.run(suite.suite(), Path(folder))
            asked.suite.write_text(json.dumps({layout.name: columns for layout, columns in measured.items()}))
            return
        written = table.page().read_text()
        said = table.parse(written)
        for layout in map(named, asked.layouts) if asked.layouts else LAYOUTS:
            [columns] = launch.run([suite.Job.whole(layout, asked.columns or COLUMNS)], Path(folder)).values()
            now = said.get(layout, {}) | {name: table.column(cells) for name, cells in columns.items()}
            said[layout] = {name: now[name] for name in COLUMNS if name in now}
            in_order = {one: said[one] for one in LAYOUTS if one in said}
            if (
                len({tuple(columns) for columns in in_order.values()}) == 1
            ):  # a new column is there when all layouts have it
                table.page().write_text(table.render(in_order, suite.described(), written))
    if len({tuple(columns) for columns in said.values()}) > 1:
        sys.exit("docs/fidelity.md is as it was: measure a new column in every layout, in one call")


if __name__ == "__main__":
    main()
