"""The lowest versions that pyproject.toml allows: of the client under every Python here, of the server under this one."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import interpose
from interpose.cli.demo_model import write_demo_model
from tests.bare_notebook import check_notebook
from tests.e2e.service import RunningService
from tests.interpreters import installed
from tests.lowest.environments import (
    Versions,
    client_environment,
    install_uv,
    normal,
    requirements,
    server_environment,
)
from tests.oracle import Oracle, difference
from tests.wheel import ROOT, build_wheel

pytestmark = pytest.mark.timeout(3000)

# torch is no part of a client.
WITH_TORCH = (
    "--ignore=tests/unit/interpose/rpc/test_remote.py",
    "--ignore=tests/unit/interpose/wire/test_wire_torch.py",
    "--deselect=tests/unit/interpose/wire/test_prompts.py::test_torch",
)
Clients = Callable[[str], tuple[Path, Versions]]


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_uv(tmp_path_factory.mktemp("uv"))


@pytest.fixture(scope="module")
def clients(uv: Path, tmp_path_factory: pytest.TempPathFactory) -> Clients:
    """Makes the client's environment for a version of Python, once."""
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    return cache(lambda version: client_environment(uv, version, wheel, tmp_path_factory.mktemp("client")))


@pytest.fixture(scope="module")
def server(uv: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Versions]:
    """The server's environment."""
    return server_environment(uv, tmp_path_factory.mktemp("server"))


def at_bound(versions: Versions, required: list[str]) -> set[str]:
    """Return the names of the requirements of which an environment has the very version of their bound."""
    found = set()
    for name, bound in (line.split(">=") for line in required if ">=" in line):
        version = versions.get(normal(name), "")
        if re.fullmatch(rf"{re.escape(bound)}(\.0)*", version):
            found.add(name)
    return found


def unit_tests(python: Path, *arguments: str) -> None:
    """Run unit tests with an interpreter."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr


def test_the_environments_have_the_bounds(clients: Clients, server: tuple[Path, Versions]) -> None:
    """Others are held higher by Ray's and vLLM's requirements, or as there is no wheel of the bound's version."""
    assert at_bound(clients("3.10")[1], requirements()) >= {"cloudpickle", "grpcio", "ml_dtypes", "numpy", "protobuf"}
    assert at_bound(server[1], requirements("serve")) >= {"cloudpickle", "greenlet", "grpcio-health-checking"}


@pytest.mark.parametrize("version", installed())
def test_the_client(clients: Clients, version: str) -> None:
    unit_tests(clients(version)[0], "tests/unit/interpose", *WITH_TORCH)


def test_the_server(server: tuple[Path, Versions]) -> None:
    unit_tests(server[0], "tests/unit", "-n", "2", "--dist", "loadfile")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@pytest.fixture(scope="module")
def service(
    server: tuple[Path, Versions], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    """A service with the lowest versions."""
    engine = {"dtype": "float32", "enforce_eager": True}
    settings: dict[str, object] = {"models": [{"name": "llama", "model": str(checkpoint), "engine": engine}]}
    running = RunningService(tmp_path_factory.mktemp("service"), settings, python=server[0]).wait()
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("version", installed())
def test_a_trace(service: RunningService, clients: Clients, checkpoint: Path, version: str, tmp_path: Path) -> None:
    with interpose.connect(service.address, progress=False) as client:
        model = client.model()
        with model.trace([3, 77, 5], max_tokens=1):
            logits = model.logits.output.save()
        assert difference(logits, Oracle(checkpoint).run([3, 77, 5], 1).logits[0]) <= 1e-4
        check_notebook(clients(version)[0], version, model, service.address, tmp_path)
