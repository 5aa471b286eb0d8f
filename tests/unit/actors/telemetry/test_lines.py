"""Files of JSON lines: private, rotated, and an error where a line cannot be written."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from actors.telemetry.lines import JsonFormatter, LineFile, line, stamp
from actors.telemetry.options import Options
from actors.telemetry.telemetry import TRACE_LOG, Telemetry
from tests.unit.actors.telemetry.test_counts import record


def test_a_line_is_one_object_on_one_line() -> None:
    text = line({"tenant": "a\nb\u2028", "bytes": 3})
    assert "\n" not in text and json.loads(text)["tenant"] == "a\nb\u2028"
    assert stamp(0.0015) == "1970-01-01T00:00:00.001Z"


def test_files_are_private_and_rotated(tmp_path: Path) -> None:
    file = LineFile(str(tmp_path / "new"), "traces", 200, 2)
    for number in range(50):
        file.write(line({"number": number}))
    file.close()
    paths = sorted((tmp_path / "new").iterdir())
    assert len(paths) == 3 and all(path.stat().st_size <= 200 for path in paths)
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    last = paths[0].read_text().splitlines()[-1]
    assert json.loads(last)["number"] == 49


def test_a_line_with_percent_signs_is_written_as_it_is(tmp_path: Path) -> None:
    file = LineFile(str(tmp_path), "traces", 1 << 20, 1)
    file.write("100 %s %d")
    file.close()
    assert next(tmp_path.iterdir()).read_text() == "100 %s %d\n"


def test_an_audit_line_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    telemetry = Telemetry("ingress", Options(folder=str(tmp_path / "taken"), audit=True))
    with pytest.raises(OSError):
        telemetry.audit({"action": "trace"})
    telemetry.trace_ended(record())  # the line of a trace that has ended anyway
    assert telemetry.take().added


def test_without_a_folder_traces_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry("session", Options())
    with caplog.at_level(logging.INFO, TRACE_LOG.name):
        telemetry.trace_ended(record(outcome="failed", code="ENGINE"))
    assert json.loads(caplog.messages[0])["code"] == "ENGINE"
    caplog.clear()
    Telemetry("session", Options(traces=False)).trace_ended(record())
    assert not caplog.messages


def test_a_process_that_is_told_later_goes_on_in_the_folder_with_its_counts(tmp_path: Path) -> None:
    telemetry = Telemetry("session")
    telemetry.trace_ended(record())
    before = telemetry.counts
    telemetry.heed(Options(folder=str(tmp_path)))
    telemetry.trace_ended(record(outcome="failed", code="ENGINE"))
    telemetry.close()
    [file] = tmp_path.iterdir()
    assert [json.loads(line)["code"] for line in file.read_text().splitlines()] == ["ENGINE"]
    assert telemetry.counts is before


def test_a_record_of_a_log_becomes_a_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        made = logging.LogRecord("actors", logging.ERROR, "f", 1, "it %s", ("failed",), (type(error), error, None))
    found = json.loads(JsonFormatter().format(made))
    assert (found["message"], found["level"], found["logger"]) == ("it failed", "ERROR", "actors")
    assert "two\nlines" in found["exception"]
