"""The Python interpreters on this machine that a notebook may run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


@cache
def installed() -> dict[str, Path]:
    """Return the path of one interpreter for each supported version that is installed, by version."""
    found = {}
    for version in SUPPORTED:
        for candidate in _candidates(version):
            if _version(candidate) == version:
                found[version] = candidate
                break
    return found


def _candidates(version: str) -> list[Path]:
    running = [Path(sys.executable)] if version == f"{sys.version_info.major}.{sys.version_info.minor}" else []
    on_path = [Path(path)] if (path := shutil.which(f"python{version}")) else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return [*running, *on_path, *sorted(pyenv.glob(f"{version}.*/bin/python"))]


def _version(python: Path) -> str:
    """Return the version that `python` says it is; "" if it does not start, as pyenv's placeholders may not."""
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
