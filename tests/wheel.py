"""The published package as a notebook installs it: its wheel, in an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.interpreters import installed

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path, source: Path = ROOT) -> Path:
    """Build the source distribution, and of it the wheel; return the wheel's path."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def bare_environment(version: str, wheel: Path, folder: Path, *arguments: str | Path, extras: str = "") -> Path:
    """Install the wheel and what it requires into an environment of a Python version; return its interpreter.

    Args:
        version: the version of Python.
        wheel: the wheel.
        folder: for the environment.
        arguments: further arguments of pip.
        extras: of the wheel, e.g. "[notebook]".
    """
    subprocess.run([installed()[version], "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}{extras}", *arguments]
    # What PYTHONPATH names counts as installed for pip.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return python
