"""`interpose serve`: what is refused before anything starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interpose.cli import main
from tests.unit.checkpoints import write_checkpoint


@pytest.fixture(autouse=True)
def _no_variables() -> Iterator[None]:
    """Run a test without variables of Ray and of the service; the command sets some, which end with the test."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("RAY_", "INTERPOSE_")):
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_ray_client_address_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert main(["serve", "/models/tiny"]) == 2
    assert "set RAY_ADDRESS=HOST:6379" in capsys.readouterr().err


def test_settings_that_make_no_sense_are_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/models/tiny", "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("interpose serve: grpc.port: ")
    assert main(["serve"]) == 2
    assert "no model to serve" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from serve_app.service import ServiceError, check_port, free_port

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServiceError, match="--port"):
            check_port("127.0.0.1", taken.getsockname()[1])
    check_port("127.0.0.1", free_port())


def test_other_commands_take_no_engine_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--max-model-len", "3"])
    assert "unknown flag --max-model-len" in capsys.readouterr().err


def test_what_serve_would_refuse_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    file = tmp_path / "service.yaml"
    file.write_text(f"models: [{{model: {model}, autoscaling_config: {{max_replica: 2}}}}]")
    assert main(["serve", "--config", str(file)]) == 2
    assert "autoscaling_config of tiny: Ray Serve has no max_replica" in capsys.readouterr().err
    assert main(["serve", "/models/tiny", "--replicas", "0"]) == 2
    assert "models[0].replicas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-modle-len", "3"], "unknown flag --max-modle-len; did you mean --max-model-len"),
        (["--max_modle_len=3"], "unknown flag --max_modle_len; did you mean --max-model-len"),
        (["--tensor-paralel-size", "2"], "unknown flag --tensor-paralel-size; did you mean --tensor-parallel-size"),
        (["--no-enforce-eagre"], "unknown flag --no-enforce-eagre"),
        (["-z"], "unknown flag -z"),
        (["--lora-modules", "calm=/nowhere"], "lora_modules: calm: there is no folder /nowhere"),
        (["--tokenizer", "/nowhere", "--max-model-len", "3"], "there is no folder /nowhere"),
        (["--config", "/nowhere"], "there is no configuration file /nowhere"),
    ],
)
def test_arguments_are_looked_at_before_the_engine_is_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)  # importing it fails
    assert main(["serve", str(write_checkpoint(tmp_path / "tiny")), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"interpose serve: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/tiny", "--max-model-len", "64"], "there is no folder /nowhere/tiny"),
        (["/nowhere/tiny", "--max-modle-len", "64"], "unknown flag --max-modle-len"),
    ],
)
def test_a_start_that_cannot_succeed_imports_neither_ray_nor_the_engine(arguments: list[str], message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INTERPOSE_"))}
    command = [sys.executable, "-X", "importtime", "-m", "interpose.cli", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    lines = ended.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert ended.returncode == 2 and ended.stdout == ""
    assert len(said) == 1 and said[0].startswith(f"interpose serve: {message}")
    assert "executor.cluster.checkpoint" in imported
    assert not imported & {"ray", "vllm", "torch"}


def test_the_engines_arguments_are_read_without_warnings(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INTERPOSE_"))}
    environment |= {"RAY_ADDRESS": "ray://head:10001"}  # refused once the arguments have been read
    command = [sys.executable, "-m", "interpose.cli", "serve", str(tmp_path), "--enforce-eager"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "set RAY_ADDRESS=HOST:6379" in ended.stderr
