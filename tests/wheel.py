"""The published package as a notebook installs it: its wheel, in an environment that has nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.interpreters import installed

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel; return its path."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def bare_environment(version: str, wheel: Path, folder: Path) -> Path:
    """Install the wheel and what it requires into an environment of a Python version; return its interpreter."""
    subprocess.run([installed()[version], "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", wheel], check=True, capture_output=True)
    return python
