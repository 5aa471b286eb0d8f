"""The service of this folder, which takes the place of the service that other tests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.service import RunningService, free_port

KEYS = {"red": "red-key-of-operators", "blue": "blue-key-of-operators", "boss": "boss-key-of-operators"}
RUNNING, WAITING = 4, 6
TOKENS = 4000
STORED = 1 << 20
KEPT_SESSIONS = 18
RESERVED_SESSIONS = 8
# The other tenants, by name; the key of each is its name with "-key".
QUOTAS: dict[str, dict[str, float]] = {
    "racer": {"running_traces": RUNNING, "waiting_traces": WAITING, "reserved_sessions": 4},
    "spender": {"tokens_per_minute": TOKENS, "reserved_sessions": 2},
    "keeper": {"stored_bytes": STORED, "reserved_sessions": 2},
    "asker": {"tokens_per_minute": 100},
    "greedy": {},
}


@dataclass(frozen=True)
class Deployed:
    """The service, and where an operator finds what it tells.

    Attributes:
        running: the service.
        files: the folder of its logs and spans.
        metrics_port: where it is scraped.
    """

    running: RunningService
    files: Path
    metrics_port: int


@pytest.fixture(scope="package")
def deployed(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A service of its own, which is new when the tests of operators begin: they count what has run."""
    folder, port = tmp_path_factory.mktemp("tenancy"), free_port()
    model = {
        "name": "tiny",
        "model": str(checkpoints["llama"]),
        "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16},
    }
    tenants: list[dict[str, object]] = [
        {"name": name, "api_key": key, "operator": name == "boss"} for name, key in KEYS.items()
    ]
    tenants[0]["quotas"] = {"sessions": 8}
    tenants += [{"name": name, "api_key": f"{name}-key", "quotas": quotas} for name, quotas in QUOTAS.items()]
    sessions = {"warm": 2, "per_actor": 4, "max_sessions": KEPT_SESSIONS + RESERVED_SESSIONS, "wait_seconds": 0.0}
    settings: dict[str, object] = {
        "models": [model],
        "ingress_replicas": 2,
        "tenants": tenants,
        "quotas": {"reserved_sessions": 0},
        "sessions": sessions,
        "metrics": {"port": port},
        "logs": {"folder": str(folder / "files"), "audit": True, "json_lines": True},
        "spans": {"enabled": True},
    }
    running = RunningService(folder, settings).wait()
    running.metadata = (("x-api-key", KEYS["boss"]),)
    assert len(running.processes("ServeReplica:interpose:ingress")) == 2
    yield Deployed(running, folder / "files", port)
    assert running.stop() == 0


@pytest.fixture
def service(deployed: Deployed) -> RunningService:
    """The service."""
    return deployed.running
