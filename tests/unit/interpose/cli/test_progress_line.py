"""`interpose serve` says what it is doing: on a terminal in one line, elsewhere in a line for each stage."""

from __future__ import annotations

import io
import re

import pytest

from interpose.cli.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_file_each_stage_has_a_line() -> None:
    out = io.StringIO()
    line = ProgressLine(out)
    for stage in ("starting Ray", "llama: loading the model (1 s)", "llama: loading the model (2 s)", "almost ready"):
        line(stage)
    line.end()
    said = out.getvalue().splitlines()
    assert all(re.match(r" *\d+ s  ", one) for one in said)
    assert [one.split("s  ")[1] for one in said] == ["starting Ray", "llama: loading the model", "almost ready"]


def test_models_that_load_together_have_one_line_for_each_stage() -> None:
    out = io.StringIO()
    line = ProgressLine(out)
    for seconds, stage in (
        (1, "importing vLLM"),
        (2, "importing vLLM"),
        (3, "model loaded after 3 s"),
        (4, "model loaded after 3 s"),
    ):
        line(f"llama: loading (worker 0: {stage}) ({seconds} s), gpt2: importing ({seconds} s)")
    assert [one.split("s  ")[1] for one in out.getvalue().splitlines()] == [
        "llama: loading (worker 0: importing vLLM), gpt2: importing",
        "llama: loading (worker 0: model loaded after 3 s), gpt2: importing",
    ]


def test_on_a_terminal_there_is_one() -> None:
    out = Terminal()
    line = ProgressLine(out)
    line("llama: loading the model (1 s)")
    line("almost ready")
    line.end()
    first, second, *cleared = out.getvalue().split("\r")[1:]
    assert first.endswith("llama: loading the model (1 s)") and "\n" not in out.getvalue()
    assert second.rstrip().endswith("almost ready") and len(second) == len(first), "nothing of the longer one is left"
    assert not "".join(cleared).strip()


def test_a_long_stage_is_said_again_in_a_log() -> None:
    out = io.StringIO()
    line = ProgressLine(out, long_seconds=0.0)
    line("llama: compiling (1 s)")
    line("llama: compiling (31 s)")
    assert [one.split("s  ")[1] for one in out.getvalue().splitlines()] == [
        "llama: compiling",
        "still llama: compiling",
    ]


def test_a_line_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = Terminal()
    ProgressLine(out)("llama: starting workers and loading the model, gpt2: importing the engine")
    assert len(out.getvalue().removeprefix("\r")) == 29 and out.getvalue().endswith("…")
