"""Whether a text is that of some code, which decides what is taken for a block that is in no file."""

from __future__ import annotations

import pytest

from interpose.capture.fileless import _key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = a - b", "x = b - a"),
        ("x = 1", "x = 2"),
        ("x = (1, 0.0)", "x = (1, -0.0)"),
        ("x = a in {1, 2}", "x = a in {1, True, 2.0}"),
        ("x = 'a'", "x = b'a'"),
        ("x = 1\ny = 2", "x = 1\n\ny = 2"),
        ("def f():\n    return a", "def f():\n    return b"),
        ("f = lambda a, /: a", "f = lambda a: a"),
        ("def f():\n    yield 1", "def f():\n    return 1"),
    ],
)
def test_texts_that_are_told_apart(one: str, other: str) -> None:
    assert _key(compile(one, "<one>", "exec")) != _key(compile(other, "<one>", "exec"))


def test_comments_make_no_difference() -> None:
    one = compile("x = 1  # one\nif x:\n    f()\n# the end", "<one>", "exec")
    assert _key(one) == _key(compile("x = 1\nif x:\n    f()  # f", "<other>", "exec"))
