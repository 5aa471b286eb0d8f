"""A Ray that does not come up is cleared away and started again, a few times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app import cluster


class Ray:
    """Starts a process, then fails as often as it is told to."""

    def __init__(self, failures: int, error: Exception) -> None:
        self._failures = failures
        self._error = error
        self.folders: list[Path] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def init(self, _temp_dir: str, **options: Any) -> None:
        assert not any(folder.exists() for folder in self.folders), "the last try has left its folder"
        for process in self.processes:
            process.wait(10)  # else the last try has left it
        self.folders.append(Path(_temp_dir))
        self.processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if len(self.folders) <= self._failures:
            raise self._error

    def shutdown(self) -> None:
        pass


def started(monkeypatch: pytest.MonkeyPatch, failures: int, error: Exception) -> tuple[Ray, list[str]]:
    """Start a head, and end it; returns what was started and what was said."""
    ray, said = Ray(failures, error), []
    monkeypatch.setattr(cluster, "ray", ray)
    monkeypatch.setattr(cluster, "_EXIT_SECONDS", 0.05)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    head = cluster.OwnHead(1)
    try:
        head.start(said.append)
    finally:
        head.stop()
        for process in ray.processes:
            process.wait(10)
        assert not any(folder.exists() for folder in ray.folders)
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")  # was set; it goes back to what it was
    return ray, said


def test_it_is_started_again_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, said = started(monkeypatch, 2, RuntimeError("The current node timed out during startup.\nmore"))
    assert len(ray.folders) == 3
    assert said == [
        f"starting Ray again ({number} of 3 tries; it did not come up: The current node timed out during startup.)"
        for number in (2, 3)
    ]


def test_it_is_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="tried 3 times; the last time: no"):
        started(monkeypatch, 9, ConnectionError("no"))


def test_what_would_fail_again_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="^too long$"):
        started(monkeypatch, 1, ValueError("too long"))
