"""The commands that can be tried without a service do what README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_model_of_the_readme(tmp_path: Path) -> None:
    (command,) = re.findall(r"^interpose (demo-model .+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    program = Path(sys.executable).with_name("interpose")
    subprocess.run([program, *command.split()], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / command.split()[1] / "model.safetensors").is_file()


def test_make_without_a_target_lists_them() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {line.split()[1] for line in shown.splitlines() if line.startswith("make ")} == set(targets) - {"help"}
