"""`interpose serve`: what is refused before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from interpose.cli import main


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
    assert "unrecognized arguments" in capsys.readouterr().err


def test_what_serve_would_refuse_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("models: [{model: /models/tiny, autoscaling_config: {max_replica: 2}}]")
    assert main(["serve", "--config", str(file)]) == 2
    assert "autoscaling_config of tiny: Ray Serve has no max_replica" in capsys.readouterr().err
    assert main(["serve", "/models/tiny", "--replicas", "0"]) == 2
    assert "models.0.replicas" in capsys.readouterr().err
