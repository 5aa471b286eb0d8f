"""The digest of a program: the same for the same code, whatever values are sent with it."""

from __future__ import annotations

import re

from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Class, Function, Items, Value
from serve_app.ingress.audit import digest


def program(source: str, **values: Value) -> pb.Program:
    made = pb.Program(source=source, filename="cell", first_line=1)
    for name, value in values.items():
        made.reads.add(name=name, value=value)
    return made


def function(source: str) -> Value:
    return Value(function=Function(name="f", source=source))


def test_values_do_not_count_and_sources_do() -> None:
    plain = digest([], program("x = 1"))
    assert re.fullmatch("sha256:[0-9a-f]{64}", plain)
    assert digest([Value(integer=3)], program("x = 1", a=Value(text="y"))) == plain
    others = [
        digest([], program("x = 2")),
        digest([], program("x = 1"), program("x = 1")),
        digest([function("def f(): pass")], program("x = 1")),
        digest([Value(class_source=Class(name="C", source="class C: pass"))], program("x = 1")),
        digest([Value(list=Items(items=[function("def f(): return 1")]))], program("x = 1")),
    ]
    assert len({plain, *others}) == 6


def test_a_function_counts_wherever_it_lies() -> None:
    source = "def f(): pass"
    nested = Value(list=Items(items=[Value(list=Items(items=[function(source)]))]))
    assert digest([nested], program("x")) == digest([], program("x", a=function(source)))


def test_texts_cannot_run_into_each_other() -> None:
    assert digest([], program("ab"), program("c")) != digest([], program("a"), program("bc"))
    assert digest([function("a"), function("b")]) == digest([function("b"), function("a")])
