"""Flags of the engine are known by name without importing it."""

from __future__ import annotations

import pytest

from executor.core.engine_names import arguments, check_flags, flags


def test_there_are_names() -> None:
    assert {"max_model_len", "enable_log_requests", "compilation_config"} <= arguments()
    assert {"--max-model-len", "-q", "-cc", "--enable-log-requests"} <= flags()


@pytest.mark.parametrize(
    "given",
    [
        ["--max-model-len", "-1", "--seed=-3"],
        ["--no-enforce-eager", "-O3", "-O", "2", "-cc.mode=3", "--compilation-config.mode", "3"],
        ["--max_model_len=64", "--hf-overrides", "--bad json"],
        ["--max-model", "64", "-qawq", "--help"],
    ],
)
def test_what_the_engine_takes_passes(given: list[str]) -> None:
    check_flags(given, ())


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--dtpye", r"unknown flag --dtpye; did you mean --dtype\?"),
        ("--max_model_length=3", r"unknown flag --max_model_length; did you mean --max-model-len\?"),
        ("--replicsa", r"unknown flag --replicsa; did you mean --replicas\?"),
        ("--nothing-like-it-at-all", r"unknown flag --nothing-like-it-at-all$"),
        ("-x", "unknown flag -x$"),
        ("--", "'--' does not separate"),
    ],
)
def test_other_flags_come_with_near_misses(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_flags([flag], ["--replicas"])
