"""A type checker knows what a notebook writes, also inside a block."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
TYPED = Path(__file__).with_name("typed.py")


def test_mypy_finds_the_wrong_lines_alone():
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(TYPED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    found = {int(line) for line in re.findall(r"typed\.py:(\d+): error", done.stdout)}
    wrong = {number for number, line in enumerate(TYPED.read_text().splitlines(), 1) if "# error:" in line}
    assert found == wrong and len(wrong) == 2, done.stdout + done.stderr
