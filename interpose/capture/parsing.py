"""Parses Python's text, in any number of threads."""

from __future__ import annotations

import ast
import threading
from typing import Literal, cast, overload

# CPython 3.11 counts the depth of a tree that it makes in one place for all threads, and raises SystemError if two mix.
_ONE_AT_A_TIME = threading.Lock()
_TRIES = 8


@overload
def parse_text(text: str, filename: str = ..., mode: Literal["exec"] = ...) -> ast.Module: ...
@overload
def parse_text(text: str, filename: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_text(
    text: str, filename: str = "<unknown>", mode: Literal["exec", "eval"] = "exec"
) -> ast.Module | ast.Expression:
    """Return the syntax tree of a text, as `ast.parse` does.

    Raises:
        SyntaxError: the text is no Python.
    """
    with _ONE_AT_A_TIME:
        for left in reversed(range(_TRIES)):
            try:
                return cast(ast.Module | ast.Expression, ast.parse(text, filename, mode))
            except SystemError:  # code that is not ours parses in another thread
                if not left:
                    raise
    raise AssertionError("a loop has an end")
