"""The notebook refuses texts that the server would not take, and says what to write instead."""

from __future__ import annotations

import ast

import pytest

from interpose.contract.limits import Sources
from interpose.v1.service_pb2 import Limits

LIMITS = Limits(max_program_bytes=1000, max_program_nodes=50, max_trace_program_bytes=1200)


def refusal(sources: Sources, source: str) -> str:
    return sources.refusal("the block", source, [ast.parse(source)])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n", ""),
        (f"x = {'1' * 1000!r}", "keep large constants in variables outside of it"),
        ("x = [" + "1, " * 60 + "]", "syntax nodes, the server takes 50; keep lists of constants"),
    ],
)
def test_one_text(source: str, words: str) -> None:
    found = refusal(Sources(LIMITS), source)
    assert words in found
    assert bool(words) == bool(found)


def test_the_texts_of_one_trace_together() -> None:
    sources = Sources(LIMITS)
    first, second = f"x = {'1' * 600!r}", f"x = {'2' * 600!r}"
    assert refusal(sources, first) == refusal(sources, first) == ""
    assert "trace fewer different blocks at a time" in refusal(sources, second)


def test_limits_that_an_older_server_does_not_tell() -> None:
    assert refusal(Sources(Limits()), "x = 1\n" * 5000) == ""
