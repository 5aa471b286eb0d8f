"""`interpose status`: what it asks for, and the answer as text."""

from __future__ import annotations

import json

import pytest

from interpose.cli import main
from interpose.cli.printing import as_json
from interpose.cli.status import table
from interpose.v1 import operator_pb2, service_pb2


def test_a_status_is_a_table() -> None:
    reply = service_pb2.StatusReply(server_version="1.2", uptime_seconds=3725, sessions=3, warm_sessions=2)
    reply.models.add(name="tiny-llama", state="RUNNING", replicas=1, running=2, waiting=5)
    reply.tenants.add(name="red", sessions=3, traces_running=2, traces_done=40, stored_bytes=3 << 20)
    reply.models[0].each.add(name="a1b2", running=2, waiting=5, sessions=3, seconds=40)
    assert "a1b2" not in table(reply), "one replica that runs is its model"
    reply.models[0].each.add(name="c3d4", stage="loading the model", seconds=12)
    text = table(reply)
    rows = [line.split() for line in text.splitlines()]
    assert ["tiny-llama", "a1b2", "3", "2", "5", "ready", "(40", "s)"] in rows
    assert ["tiny-llama", "c3d4", "0", "0", "0", "loading", "the", "model", "(12", "s)"] in rows
    assert "up 1 h 2 min" in text
    assert ["tiny-llama", "RUNNING", "1", "2", "5"] in [line.split() for line in text.splitlines()]
    assert ["red", "3", "2", "40", "3.0", "MiB"] in [line.split() for line in text.splitlines()]


def test_a_tenant_sees_its_quotas() -> None:
    reply = service_pb2.StatusReply(server_version="1.2")
    red = reply.tenants.add(name="red", sessions=1)
    assert "quota" not in table(reply)
    red.quotas.add(name="tokens_per_minute", limit=4000, used=120.4, refused=3)
    red.quotas.add(name="running_traces", limit=4, used=4)
    rows = [line.split() for line in table(reply).splitlines()]
    assert ["tenant", "quota", "used", "limit", "refused"] in rows
    assert ["red", "tokens_per_minute", "120", "4000", "3"] in rows and ["red", "running_traces", "4", "4", "0"] in rows


def test_the_command_asks_the_service(service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", service.address, "--api-key", "a key"]) == 0
    assert "interpose 9.9" in capsys.readouterr().out and service.metadata["authorization"] == "Bearer a key"


def test_the_answer_as_json_has_every_field(service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", f"grpc://{service.address}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "models": [], "tenants": [], "sessions": 0, "warm_sessions": 0, "uptime_seconds": 0.0, "server_version": "9.9",
    }  # fmt: skip


def test_traces_as_json() -> None:
    reply = operator_pb2.ListTracesReply(total=2)
    row = reply.traces.add(key="red/1", tenant="red")
    row.status.state = service_pb2.JOB_STATE_RUNNING
    reply.traces.add()
    first, second = json.loads(as_json(reply))["traces"]
    assert first["key"] == "red/1" and first["status"]["state"] == "JOB_STATE_RUNNING"
    assert first["status"]["finished_invokes"] == 0 and second["status"] is None


def test_a_service_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "localhost:1"]) == 1
    assert "the server at localhost:1 cannot be reached" in capsys.readouterr().err
