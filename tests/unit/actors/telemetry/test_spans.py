"""Spans: what a client sends as its own span is checked, and without settings there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.telemetry.options import Options
from actors.telemetry.spans import Spans, parent_of

PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


@pytest.mark.parametrize(
    "sent",
    ["", "x", PARENT + "0", PARENT.upper().replace("1", "A"), "01" + PARENT[2:], "00-" + "0" * 32 + PARENT[35:], b"x", None,
     PARENT[:36] + "0" * 16 + "-01", "x" * 100_000],
)  # fmt: skip
def test_what_is_no_span_is_dropped(sent: object) -> None:
    assert parent_of(sent) == ""
    assert parent_of(PARENT) == PARENT


def test_without_settings_the_context_goes_on_and_nothing_is_made() -> None:
    spans = Spans("ingress", Options())
    span = spans.begin("ingress", PARENT, trace="t")
    assert not spans.on and span.context == PARENT
    span.child("worker", 1.0)
    span.end("failed")
    spans.close()


def test_spans_go_to_a_file(tmp_path: Path) -> None:
    spans = Spans("engine", Options(folder=str(tmp_path), spans=True))
    span = spans.begin("engine", PARENT, trace="t")
    assert span.context.split("-")[1] == "1" * 32 and span.context != PARENT
    span.child("worker", 0.5, steps=3)
    span.end("ValueError", outcome="failed")
    spans.close()
    [path] = tmp_path.iterdir()
    found = {one["name"]: one for one in map(json.loads, path.read_text().splitlines())}
    assert found["engine"]["parent_id"] == "0x" + "2" * 16
    assert found["worker"]["parent_id"] == found["engine"]["context"]["span_id"]
    assert found["engine"]["status"] == {"status_code": "ERROR", "description": "ValueError"}
    assert found["worker"]["attributes"] == {"steps": 3}


def test_a_client_decides_whether_its_trace_has_spans(tmp_path: Path) -> None:
    spans = Spans("ingress", Options(folder=str(tmp_path), spans=True, sample=0.0))
    spans.begin("alone").end()
    spans.begin("sampled", PARENT).end()
    spans.begin("not sampled", PARENT[:-1] + "0").end()
    spans.close()
    [path] = tmp_path.iterdir()
    assert [json.loads(one)["name"] for one in path.read_text().splitlines()] == ["sampled"]
