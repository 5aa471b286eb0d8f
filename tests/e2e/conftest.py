"""One service for the whole folder: two models, one of them over two tensor-parallel workers. It leaves nothing behind."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import yaml

import interpose
from interpose.cli.demo_model import write_demo_model
from serve_app.key_hashes import hashed, id_in, new_key
from tests.e2e.service import RunningService, wait_for
from tests.fidelity.adapters import ADAPTERS, write_adapter


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint of each architecture, by name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {arch: write_demo_model(folder / arch, arch) for arch in ("llama", "gpt2")}


@pytest.fixture(scope="package")
def service(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The service that most tests share; where there are GPUs, with as many of its models and workers as they have room for."""
    gpus = torch.cuda.device_count()
    ranks = 1 if gpus == 1 else 2
    room = gpus // ranks or len(checkpoints)
    # Small models leave most of a GPU to others. What a CPU gives, the executor says.
    memory: dict[str, float] = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 30} if gpus else {}
    models = [
        {
            "name": name,
            "model": str(path),
            "tensor_parallel_size": ranks,
            # One as it is by default, compiled; the other starts sooner.
            "engine": {"dtype": "float32", "enforce_eager": name == "gpt2", **memory},
            "limits": {"step_seconds": 6.0, "block_memory_bytes": 1 << 30},
        }
        for name, path in list(checkpoints.items())[:room]
    ]
    # Nothing is left in the object store soon after the tests, nor a session of a script of the documents.
    sessions = {"warm": 2, "kept_upload_seconds": 12.0, "idle_seconds": 400.0}
    running = RunningService(tmp_path_factory.mktemp("service"), {"models": models, "sessions": sessions})
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


RETENTION_SECONDS = 12.0
TENANTS = [{"name": "red", "api_key": "red-key-1"}, {"name": "blue", "api_key": "blue-key-1"}]
# Impatient, so that tests need not wait, but not so much that a busy machine, on which sessions report late what they run, seems
# to have nothing to do. Four traces at a time make a second replica, seven would make a third.
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 3.2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 10.0,
    "look_back_period_s": 3.0,
    "metrics_interval_s": 0.5,
}


GREEN, OPERATOR = new_key("laptop"), new_key("admin")


def write_tenants(file: Path, **keys: list[str]) -> Path:
    """Write the file with two more tenants, of which one is an operator, each with a first key and further keys."""
    tenants: list[dict[str, object]] = [{"name": "green"}, {"name": "operators", "operator": True}]
    for tenant, first in zip(tenants, (GREEN, OPERATOR), strict=True):
        given = [first, *keys[str(tenant["name"])]]
        tenant["api_keys"] = [{"id": id_in(key), "hash": str(hashed(key))} for key in given]
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"tenants": tenants}))
    return new.replace(file)


def with_tenants(
    checkpoint: Path, folder: Path, adapters: Mapping[str, Path] | None = None, trust: str = "none"
) -> Iterator[RunningService]:
    """Run a service with two tenants, and one worker for each of its replicas, which come and go.

    Args:
        checkpoint: the model.
        folder: for the service's files.
        adapters: of the model, by name.
        trust: of these two tenants; the blocks of trust none run in sandboxes, because there may be other tenants.
    """
    model = {
        "name": "tiny",
        "model": str(checkpoint),
        "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 512},
        "autoscaling_config": AUTOSCALING,
        "lora_modules": {name: str(path) for name, path in (adapters or {}).items()},
    }
    sessions = {"warm": 1, "per_actor": 2, "retention_seconds": RETENTION_SECONDS, "stored_bytes": 8 << 20}
    sessions |= {"max_per_tenant": 3, "wait_seconds": 1.0}
    tenants = [{**tenant, "trust": trust} for tenant in TENANTS]
    settings: dict[str, object] = {"models": [model], "tenants": tenants, "sessions": sessions}
    settings["tenants_file"] = str(write_tenants(folder / "tenants.yaml", green=[], operators=[]))
    # As an operator may say it; without, the service makes a token of its own.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    running = RunningService(folder, settings, environment=token).wait()
    running.metadata = (("x-api-key", OPERATOR),)  # sees what all tenants have
    yield running
    running.stop()


@pytest.fixture(scope="package")
def merged(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The llama with each of its adapters merged into its weights, by the adapter's name; the adapter is in the folder above."""
    if torch.cuda.is_available():
        return {}  # vLLM's kernels for adapters on GPUs take half precision only
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(checkpoints["llama"], folder / name, *how, seed)
        for seed, (name, how) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="package")
def second(
    service: RunningService,
    checkpoints: dict[str, Path],
    merged: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningService]:
    """A service of its own, beside the shared one, with tenants, and with adapters where they can be had in float32."""
    adapters = {name: weights.parent for name, weights in merged.items()}
    yield from with_tenants(checkpoints["llama"], tmp_path_factory.mktemp("second"), adapters)


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
