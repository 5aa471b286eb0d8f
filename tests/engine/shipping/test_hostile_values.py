"""What a client of nobody's making sends: a worker refuses it, within its bounds, and goes on."""

from __future__ import annotations

import collections
import math
import pathlib
import re
from typing import Any

import pytest

import interpose
from interpose.v1.value_pb2 import RangeValue, Value
from tests.engine.shipping.test_classes import Pair
from tests.engine.shipping.worker import Shipped, altered

ENDLESS = Value(range=RangeValue(start=0, stop=1 << 62, step=1))


def test_a_deque_is_made_of_a_list() -> None:
    line = collections.deque([1])

    def endless(value: Any) -> None:
        if value.WhichOneof("kind") == "call":
            value.call.args[0].CopyFrom(ENDLESS)

    with pytest.raises(interpose.InvalidArgument, match="a list is needed"), altered(endless):
        x = line


def test_an_object_is_made_of_what_its_class_extends() -> None:
    pair = Pair(1)

    def endless(value: Any) -> None:
        if value.WhichOneof("kind") == "instance":
            value.instance.contents.CopyFrom(ENDLESS)

    with (
        pytest.raises(interpose.InvalidArgument, match="a Pair is made from a tuple, not from a range"),
        altered(endless),
    ):
        x = pair


def test_a_call_runs_under_the_blocks_bounds() -> None:
    pattern = re.compile("a")

    def slow(value: Any) -> None:
        if value.WhichOneof("kind") == "call":
            value.call.args[0].text = "(?:x|(?:y{1,4}|[a-z]))" * 100_000

    with pytest.raises(interpose.DeadlineExceeded, match="longer than"), altered(slow, 0.3):
        x = pattern


@pytest.mark.parametrize(
    ("name", "words"),
    [("leaves_at_once", "cannot import leaves_at_once: 3"), ("", "cannot import"), (".x", "cannot import")],
)
def test_a_module_that_is_none(name: str, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    module = math

    def another(trace: Any) -> None:
        [binding] = trace.invokes[0].program.reads
        binding.value.python_module = name

    with pytest.raises(interpose.InvalidArgument, match=words), Shipped(another):
        x = module.pi


@pytest.mark.parametrize("source", ["x = " + "-" * 100_000 + "1", "x = " + "(" * 500, "x = '\0'"])
def test_a_source_that_does_not_compile(source: str) -> None:
    def other(trace: Any) -> None:
        trace.invokes[0].program.source = source

    with pytest.raises(interpose.InvalidArgument, match="cannot compile the block"), Shipped(other):
        x = 1
