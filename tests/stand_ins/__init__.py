"""Packages that stand in for what a machine has not."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def use() -> None:
    """Have this process and those that it starts find the packages that cannot be imported here."""
    there = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0
    if there:
        return
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
