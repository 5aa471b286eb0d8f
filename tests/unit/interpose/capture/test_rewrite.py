"""`rewrite.py`: what shipped code means, and that its lines stay the notebook's."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest

from interpose.capture import GUARD, SAVE, compile_block, compile_function, function_source


class Ended(BaseException):
    """Stands for the exceptions by which a worker ends a block."""


class Tracer:
    iter = ("ab",)

    def all(self) -> str:
        return "xy"


def guard() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, Ended):
        raise error


def run(source: str, *, indent: int = 0, **names: object) -> dict[str, Any]:
    saved: list[object] = []

    def save(value: object) -> object:
        saved.append(value)
        return value

    namespace: dict[str, Any] = {SAVE: save, GUARD: guard, "tracer": Tracer(), "Ended": Ended, **names}
    exec(compile_block(source, "<cell>", 40, indent, frozenset({"tracer"})), namespace)
    return namespace | {"saved": saved}


def test_saves_of_anything() -> None:
    names = run("x = [1].save()\ny = {'a': (2).save()}.save()\nz = (lambda: 'text'.save())()")
    assert names["saved"] == [[1], 2, {"a": 2}, "text"]


def test_save_with_arguments_is_the_object_s_own() -> None:
    class File:
        def save(self, path: str) -> str:
            return path

    assert run("x = f.save('p')", f=File())["x"] == "p"


@pytest.mark.parametrize("clause", ["except:", "except BaseException:", "except BaseException as error:"])
def test_handlers_let_control_through(clause: str) -> None:
    with pytest.raises(Ended):
        run(f"try:\n  raise Ended\n{clause}\n  pass")
    assert run(f"try:\n  1 / 0\n{clause}\n  caught = True")["caught"]


def test_step_blocks_are_loops() -> None:
    names = run(
        "got = []\nwith tracer.iter[0] as s, tracer.all() as t:\n  got.append(s + t)\nwith tracer.all():\n  got.append(0)"
    )
    assert names["got"] == ["ax", "ay", "bx", "by", 0, 0]


def test_nested_functions_share_the_block_s_names() -> None:
    source = (
        "n = 0\ndef add():\n  nonlocal n\n  n += 1\n  k = 0\n  def inner():\n    nonlocal k, n\n    k += 5\n    n += k\n"
        "  inner()\n  return k\nk = add()"
    )
    names = run(source)
    assert (names["n"], names["k"]) == (6, 5)


def test_annotations_are_not_evaluated() -> None:
    names = run("x: Missing = 1\ny: Missing\ndef f(a: Missing) -> Missing: return a\nz = f(2)")
    assert (names["x"], names["z"]) == (1, 2) and "__annotations__" not in names


@pytest.mark.parametrize("source", ["x = 1\ny = x / 0\n", "    x = 1\n    y = x / 0\n"])
def test_lines_and_columns(source: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(source, indent=4)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == ("<cell>", 41)
    if sys.version_info >= (3, 11):
        assert (frame.colno, frame.end_colno) == (8, 13)


def test_not_python() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile_block("x = = 1", "<cell>", 1, 0)
    assert caught.value.filename == "<cell>"


def make_functions() -> list[Any]:
    # ruff: noqa: B023, E731
    functions: list[Any] = []
    for layer in range(2):
        functions += [lambda x, layer=layer: (x, layer), lambda x: (x, layer, "cell")]

        def named(x: int, *rest: int, factor: Any = [layer], **more: int) -> Any:  # noqa: B006
            """Has a docstring."""
            return x, factor, rest, more, layer

        functions.append(named)
    return functions


@pytest.mark.parametrize("index", range(6))
def test_functions_made_again(index: int) -> None:
    function = make_functions()[index]
    found = function_source(function)
    assert found is not None and set(found.bindings) == set(found.reads)
    namespace: dict[str, Any] = {SAVE: None, GUARD: guard, **found.bindings}
    exec(compile_function(found.source, found.filename, found.first_line, found.indent, found.name), namespace)
    again = namespace[found.name]
    assert again(7) == function(7)
    assert again.__code__.co_firstlineno == function.__code__.co_firstlineno


def test_a_lambda_over_several_lines() -> None:
    function = (lambda a,
                b=2: [a,
        b])  # fmt: skip
    found = function_source(function)
    assert found is not None
    namespace: dict[str, Any] = {}
    exec(compile_function(found.source, found.filename, found.first_line, found.indent, "made"), namespace)
    assert namespace["made"](1) == [1, 2]


def test_two_lambdas_that_look_the_same() -> None:
    pair = (lambda a: a + 1, lambda a: a + 1)
    assert function_source(pair[1]) is not None
