"""The programs of this folder under every interpreter of this machine that a client may run on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.interpreters import installed

PROGRAMS = ("program.py", "classes_program.py", "language_program.py", "statement_program.py")


@pytest.mark.parametrize("version", installed())
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", [(), ("-O",), ("-X", "no_debug_ranges")], ids=["plain", "optimised", "no-columns"])
def test_captures_everywhere(version: str, options: tuple[str, ...], program: str) -> None:
    # Under -O the asserts are gone: it shows that sources are still recognised and that nothing raises.
    path = Path(__file__).with_name(program)
    done = subprocess.run([str(installed()[version]), *options, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"Python {version}:\n{done.stdout}{done.stderr}"
    assert done.stdout.strip() == "ok"
