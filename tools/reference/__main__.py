"""Writes the reference pages.

With `--check` it says whether the files are as it would write them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.reference.commands import commands_page
from tools.reference.settings import settings_page

FOLDER = Path(__file__).parents[2] / "docs"
PAGES = {"settings.md": settings_page, "commands.md": commands_page}


def main() -> int:
    """Write or check the pages; return the exit status."""
    wrong = [name for name, page in PAGES.items() if (FOLDER / name).read_text() != page()] if _checks() else []
    if wrong:
        print(f"not as `python -m tools.reference` writes them: {', '.join(wrong)}", file=sys.stderr)
    if not _checks():
        for name, page in PAGES.items():
            (FOLDER / name).write_text(page())
    return 1 if wrong else 0


def _checks() -> bool:
    return "--check" in sys.argv[1:]


if __name__ == "__main__":
    sys.exit(main())
