"""`interpose doctor`: what is really missing is said, with the way to get it; nothing else makes it fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interpose.cli import main
from interpose.cli.doctor.versions import fits

TAKEN = "127.0.0.1"


def findings(*flags: str, path: Path | None = None, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command in a process of its own; return its status, and what it found by name."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INTERPOSE_"))}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "interpose.cli", "doctor", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | variables, timeout=300)
    assert done.stderr == ""
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)["findings"]}


def package(folder: Path, name: str, version: str, source: str) -> None:
    """Install a package into a folder, as pip does."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def missing(found: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, one in found.items() if one["status"] == "missing"}


def doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_a_client_needs_little(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = doctor(capsys, "--client")
    names = {one["name"] for one in said["findings"]}
    assert (status, said["ok"], said["role"]) == (0, True, "client")
    assert names == {"Python", "interpose", "cloudpickle", "grpcio", "ml-dtypes", "numpy", "protobuf"}
    assert main(["doctor", "--client"]) == 0
    assert "Nothing is missing." in capsys.readouterr().out


def test_what_holds_a_port_is_named() -> None:
    with socket.socket() as held:
        held.bind((TAKEN, 0))
        held.listen()
        number = held.getsockname()[1]
        status, found = findings("--server", "--port", str(number), "--workers", "1")
    one = found[f"port {number}"]
    assert status == 1 and one["status"] == "missing" and f"(process {os.getpid()})" in one["found"]
    assert f"--port {number + 1}" in one["remedy"]
    assert missing(found) == {f"port {number}"}, "everything else that the tests run with is there"
    assert found["import torch"]["status"] == "ok"


def test_the_ports_of_a_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "service.yaml"
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        number = held.getsockname()[1]
        file.write_text(f"models: [{{model: any}}]\nmetrics: {{port: {number}}}\nhttp: {{port: 9077}}\n")
        _, found = findings("--server", "--config", str(file), INTERPOSE_GRPC__PORT="9078")
    assert found[f"port {number}"]["status"] == "missing" and "metrics" in found[f"port {number}"]["found"]
    assert {"port 9077", "port 9078"} <= found.keys()
    file.write_text("models: [{model: any}]\ngrpc: {prot: 9000}\n")
    status, found = findings("--server", "--config", str(file))
    assert status == 1 and "grpc.prot" in found["settings"]["found"]


def test_shared_memory_that_is_too_small(tmp_path: Path) -> None:
    status, found = findings("--server", "--workers", "10000000")
    one = found["shared memory"]
    assert status == 1 and one["status"] == "missing" and "10000000 workers need" in one["found"]
    assert "--shm-size=" in one["remedy"] and "remount" in one["remedy"]
    _, found = findings("--server", "--shared-memory", str(tmp_path / "none"))
    assert "No such file" in found["shared memory"]["found"] and "mount -t tmpfs" in found["shared memory"]["remedy"]


def test_a_torch_of_another_version(tmp_path: Path) -> None:
    package(tmp_path, "torch", "2.0.1", "")
    status, found = findings("--server", path=tmp_path)
    assert status == 1 and "torch" in missing(found)
    assert found["torch"]["found"].startswith("2.0.1; vllm") and "pip install 'vllm" in found["torch"]["remedy"]


def test_builds_that_cannot_be_imported(tmp_path: Path) -> None:
    package(tmp_path, "torchvision", "0.1", "raise RuntimeError('operator torchvision::nms does not exist')")
    package(tmp_path, "torchaudio", "0.1", "import os; os.abort()")
    package(tmp_path, "torch", "2.13.0+cpu", "")
    status, found = findings("--server", path=tmp_path)
    one = found["import torchvision"]
    assert status == 1 and one["status"] == "missing"
    assert one["found"] == "0.1 is broken: RuntimeError: operator torchvision::nms does not exist"
    assert one["remedy"].startswith("pip uninstall torchvision")
    assert (
        found["import torchaudio"]["status"] == "warning" and "ends the process" in found["import torchaudio"]["found"]
    )


def test_an_engine_for_gpus_without_one(tmp_path: Path) -> None:
    package(tmp_path, "vllm", "0.1.0", "")
    package(tmp_path, "torch", "2.13.0+cpu", "")
    status, found = findings("--server", path=tmp_path, PATH="/nowhere")
    assert status == 1 and {"GPU", "torch", "vllm"} <= missing(found)
    assert "needed is ==0.32.0" in found["vllm"]["found"] and "docker run --gpus all" in found["GPU"]["remedy"]
    assert "built for CPUs" in found["torch"]["found"]


def test_gpus_and_a_torch_that_does_not_see_them(tmp_path: Path) -> None:
    """The program stands in for the driver's, which only a machine with a GPU has."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15'\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    _, found = findings("--server", PATH=path)
    assert found["GPU"]["found"] == "NVIDIA H100 80GB HBM3, 81559 MiB, driver 550.54.15"
    assert found["GPU"]["status"] == "warning" and "for CPUs" in found["GPU"]["remedy"], "the engine here is for CPUs"
    package(tmp_path, "vllm", "0.32.0", "")
    blind = "class cuda:\n is_available = staticmethod(lambda: False)\n init = staticmethod(lambda: 1 / 0)\n"
    package(tmp_path, "torch", "2.11.0", f"{blind}class version:\n cuda = '13.0'\n")
    status, found = findings("--server", path=tmp_path, PATH=path)
    assert status == 1 and found["GPU"]["status"] == "ok" and found["CUDA"]["status"] == "missing"
    assert found["CUDA"]["found"] == "torch is built for CUDA 13.0 and sees 0 of 1 GPUs: division by zero"
    assert "driver is too old" in found["CUDA"]["remedy"] and "overwrite" in found["engine"]["found"]


def test_a_cluster_that_is_not_there() -> None:
    status, found = findings("--server", RAY_ADDRESS="127.0.0.1:1")
    assert status == 1 and "cannot be reached" in found["Ray cluster"]["found"]
    assert "port 9000" not in found, "the ports are those of the cluster's head"


@pytest.mark.parametrize(
    ("version", "wanted", "fit"),
    [
        ("2.13.0+cpu", "==2.13.0+cpu", True),
        ("2.13.0", "==2.13.0+cpu", False),
        ("2.13.0+cu129", "==2.13.0", True),
        ("0.32.0rc1", "==0.32.0", False),
        ("3.11.7", ">=3.11,<3.15", True),
        ("3.15.0", ">=3.11,<3.15", False),
        ("1.10", ">=1.9", True),
        ("4.25", ">=4.25.0", True),
        ("2.1", "~=2.0", True),
        ("3.0", "~=2.0", False),
        ("1.5.2", "==1.5.*", True),
        ("1.5.2", "!=1.5.2", False),
        ("7.0", "", True),
    ],
)
def test_versions_are_compared_as_pip_does(version: str, wanted: str, fit: bool) -> None:
    assert fits(version, wanted) is fit
