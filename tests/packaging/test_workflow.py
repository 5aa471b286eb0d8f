"""The workflow of GitHub Actions calls targets of the Makefile and commands that are documented, and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
RUNS = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


def test_its_commands_exist() -> None:
    for command in RUNS:
        if command.startswith("make "):
            done = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        else:
            assert command.startswith(("docker build --target cpu ", "docker run --rm ")), command
    assert {command.split()[1] for command in RUNS if command.startswith("make ")} == {
        "lint", "docs", "packages", "test-unit", "test",
    }  # fmt: skip


def test_it_reads_the_repository_alone() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "secrets." not in text
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", one) for one in re.findall(r"uses: (\S+)", text))
    assert all("timeout-minutes" in job for job in WORKFLOW["jobs"].values())
