"""Blocks of one trace run apart if they share nothing that can change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from executor.plan.apart import why_not_apart
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value

STEER = "for step in tracer.iter[:]:\n    model.layers[1].output[0][:] += 2 * v\n"
KEEP = "kept = [].save()\nfor step in tracer.iter[:]:\n    kept.append(model.layers[1].output[0])\n"


def trace(first: str, second: str, scope: dict[str, Value], change: Callable[[Any], object] = lambda made: None) -> Any:
    """Return a trace of two blocks that read all names of the scope."""
    made = pb.Trace(id="t")
    made.scope.values.extend(scope.values())
    for text in (first, second):
        invoke = made.invokes.add()
        invoke.program.source, invoke.program.filename, invoke.program.first_line = text, "<cell>", 1
        invoke.program.reads.append(Binding(name="model", value=Value(module="")))
        invoke.program.reads.append(Binding(name="tracer", value=Value(tracer=True)))
        for i, name in enumerate(scope):
            if re.search(rf"\b{name}\b", text):
                invoke.program.reads.append(Binding(name=name, value=Value(ref=i)))
    change(made)
    return made


def tensor() -> Value:
    made = Value()
    made.tensor.shape.append(4)
    return made


def a_list() -> Value:
    made = Value()
    made.list.items.add().ref = 0
    return made


def a_function() -> Value:
    made = Value()
    made.function.source = "def f(x): v.add_(x)"
    made.function.reads.append(Binding(name="v", value=Value(ref=0)))
    return made


def a_tuple() -> Value:
    made = Value()
    made.tuple.items.add().list.items.add().integer = 1
    return made


APART = {
    "nothing": (KEEP, KEEP, {}),
    "a number": (KEEP + "n + 1\n", KEEP + "n + 2\n", {"n": Value(integer=3)}),
    "a tensor that is read": (STEER, STEER + KEEP, {"v": tensor()}),
    "a tensor that is scaled": (STEER, "model.layers[0].output *= -v / v.norm()\n", {"v": tensor()}),
    "a tensor of one block": (STEER, KEEP, {"v": tensor()}),
    "a list of one block": (KEEP + "names.append(1)\n", KEEP, {"v": tensor(), "names": a_list()}),
}
TOGETHER = {
    "a list": (KEEP + "names.append(1)\n", "print(names)\n", {"v": tensor(), "names": a_list()}),
    "a tensor in a list of another block": ("names[0].add_(1)\n", STEER, {"v": tensor(), "names": a_list()}),
    "a function that changes it": ("f(1)\n", STEER, {"v": tensor(), "f": a_function()}),
    "a function of both": ("f(1)\n", "f(2)\n", {"v": tensor(), "f": a_function()}),
    "a change in place": (STEER, "v.add_(1)\n", {"v": tensor()}),
    "an item": (STEER, "v[0] = 1\n", {"v": tensor()}),
    "an alias": (STEER, "w = v\nw += 1\n", {"v": tensor()}),
    "an argument": (STEER, "torch.relu_(v)\n", {"v": tensor()}),
    "a list that takes its parts": (STEER, "kept = []\nkept += v\n", {"v": tensor()}),
    "in place itself": (STEER, "v += 1\n", {"v": tensor()}),
    "a list in a tuple": ("names[0].append(1)\n", "print(names)\n", {"names": a_tuple()}),
    "a view": (STEER, "x = v.T\n", {"v": tensor()}),
}


@pytest.mark.parametrize("name", APART)
def test_blocks_that_share_nothing_that_changes_are_apart(name: str) -> None:
    assert why_not_apart(trace(*APART[name])) == ""


@pytest.mark.parametrize("name", TOGETHER)
def test_other_blocks_are_not(name: str) -> None:
    first, second, scope = TOGETHER[name]
    assert why_not_apart(trace(first, second, scope))
    assert why_not_apart(trace(second, first, scope))


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.shared.add(name="kept"),
        lambda made: made.exchanged.append("x"),
        lambda made: made.invokes[1].after.append(0),
        lambda made: made.invokes.extend([made.invokes[0]] * 20),
        lambda made: setattr(made.invokes[0], "joint", True),
        lambda made: setattr(made.invokes[0], "gang", True),
    ],
)
def test_blocks_that_meet_are_not_apart(change: Callable[[Any], object]) -> None:
    assert why_not_apart(trace(KEEP, KEEP, {}, change))
