"""What a worker tells of its start."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import ray

from executor.core.startup import REPLICA_VARIABLE, Startup


def test_when_the_model_was_loaded_stays_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, str]] = []
    directory = SimpleNamespace(worker_stage=SimpleNamespace(remote=lambda *stage: told.append(stage)))
    monkeypatch.setattr(ray, "get_actor", lambda *args, **options: directory)
    monkeypatch.setattr(Startup, "_loaded", "")
    monkeypatch.setenv(REPLICA_VARIABLE, "")
    Startup.of_worker(1).tell("nobody listens")
    startup = Startup("r1", 1)
    startup.tell("loading the model")
    assert 12 <= startup.loaded(time.monotonic() - 12) < 13
    startup.remember()
    Startup.of_worker(1).tell("compiling the model")
    assert told == [
        ("r1", 1, "loading the model"),
        ("r1", 1, "model loaded after 12 s"),
        ("r1", 1, "compiling the model (loaded after 12 s)"),
    ]
