"""Settings of what operators see: what has nowhere to go is refused."""

from __future__ import annotations

import pytest

from actors.telemetry.options import Options
from serve_app import settings_telemetry
from serve_app.settings import settings_from


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.upper().startswith("INTERPOSE_")]:
        monkeypatch.delenv(name)


def test_usually_only_lines_of_traces_are_written() -> None:
    assert settings_from({"model": "m"}).telemetry == Options()


def test_every_process_is_told_the_same() -> None:
    logs = {
        "folder": "/var/log/x",
        "audit": True,
        "json_lines": True,
        "file_bytes": 1 << 20,
        "files": 3,
        "traces": False,
    }
    given = settings_from({"model": "m", "logs": logs, "spans": {"enabled": True, "sample": 0.5}}).telemetry
    assert given == Options("/var/log/x", True, False, True, 1 << 20, 3, True, "", 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logs": {"audit": True}}, "logs.audit needs logs.folder"),
        ({"spans": {"enabled": True}}, "spans.enabled needs spans.endpoint"),
        ({"spans": {"enabled": True, "endpoint": "collector:4318"}}, "URL of a collector"),
        ({"spans": {"sample": 1.5}}, "sample"),
        ({"logs": {"files": 0}}, "files"),
        ({"metrics": {"port": 70_000}}, "port"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_from({"model": "m", **arguments})


def test_a_collector_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {"enabled": True, "endpoint": "http://collector:4318/v1/traces"}
    monkeypatch.setattr(settings_telemetry, "_OTLP", "opentelemetry.no_such_exporter")
    with pytest.raises(ValueError, match="opentelemetry-exporter-otlp-proto-http"):
        settings_from({"model": "m", "spans": spans})
