"""One service for the whole folder: two models, one of them over two tensor-parallel workers. It leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import interpose
from interpose.cli.demo_model import write_demo_model
from tests.e2e.service import RunningService, wait_for


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint of each architecture, by name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {arch: write_demo_model(folder / arch, arch) for arch in ("llama", "gpt2")}


@pytest.fixture(scope="package")
def service(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The service that most tests share; where there are GPUs, with as many of its models as they have room for."""
    room = torch.cuda.device_count() // 2 if torch.cuda.is_available() else len(checkpoints)
    models = [
        {
            "name": name,
            "model": str(path),
            "tensor_parallel_size": 2,
            # One as it is by default, compiled; the other starts sooner.
            "engine": {"dtype": "float32", "enforce_eager": name == "gpt2"},
            "limits": {"step_seconds": 6.0, "block_memory_bytes": 1 << 30},
        }
        for name, path in list(checkpoints.items())[:room]
    ]
    running = RunningService(tmp_path_factory.mktemp("service"), {"models": models, "sessions": {"warm": 2}})
    running.wait()
    yield running
    try:
        # Sessions and engines report every second or so.
        wait_for(lambda: not running.status().sessions, 10)
        wait_for(lambda: not any(model.running or model.waiting for model in running.status().models), 10)
        wait_for(lambda: sum(tenant.stored_bytes for tenant in running.status().tenants) == 0, 10)
        wait_for(lambda: running.object_store_bytes() < 1 << 20, 30)
    finally:
        assert running.stop() == 0


@pytest.fixture
def client(service: RunningService) -> Iterator[interpose.Client]:
    """A client of the shared service."""
    with interpose.connect(service.address, progress=False) as client:
        yield client


@pytest.fixture(params=["llama"])
def model(client: interpose.Client, request: pytest.FixtureRequest) -> interpose.Model:
    """The llama of the shared service."""
    return client.model(request.param)


@pytest.fixture
def session(service: RunningService) -> Iterator[str]:
    """A session without the client library."""
    opened = service.open_session()
    yield opened
    service.close_session(opened)
