"""Every folder of the code and of the tests says in one line what it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = ("executor", "interpose", "serve_app", "actors", "tests")
LONGEST = 130


def folders(root: Path) -> list[Path]:
    """Return a folder and those in it that hold Python files, at any depth."""
    return sorted({path.parent for path in root.rglob("*.py")} | {root})


def opening(folder: Path) -> str:
    """Return the first line of a package's docstring, "" if it has none."""
    file = folder / "__init__.py"
    said = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    return said.partition("\n")[0] if said else ""


@pytest.mark.parametrize("root", ROOTS)
def test_every_folder_says_what_it_is(root: str) -> None:
    lines = {folder.relative_to(ROOT).as_posix(): opening(folder) for folder in folders(ROOT / root)}
    assert [folder for folder, line in lines.items() if not line.endswith((".", ":"))] == []
    assert [folder for folder, line in lines.items() if len(line) > LONGEST] == []
