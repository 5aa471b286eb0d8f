"""Writes the dashboards' files.

With `--check` it says whether the files are as it would write them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.dashboards.boards import boards

FOLDER = Path(__file__).parents[2] / "dashboards" / "grafana"


def main() -> int:
    """Write or check the files; return the exit status."""
    wrong = []
    for name, text in boards().items():
        path = FOLDER / f"{name}.json"
        if "--check" in sys.argv[1:]:
            if not path.is_file() or path.read_text() != text:
                wrong.append(path.name)
        else:
            path.write_text(text)
    if wrong:
        print(f"not as `python -m tools.dashboards` writes them: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
