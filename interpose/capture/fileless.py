"""Finds the source of code without a file: typed, piped in, or given with ``-c``.

Before Python 3.13 the interpreter drops such text when it has compiled it. It is often still where it came from: on the
command line, in the file that is the standard input, in the history of the prompt. All of that may be other text by now,
so a text counts only if it compiles to the very code that runs, names, constants, instructions and positions alike.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import stat
import sys
import warnings
from collections.abc import Hashable, Iterator
from types import CodeType

from interpose.capture.flags import future_flags

_MOST_BYTES = 4 << 20  # of the standard input
_MOST_LINES = 20_000  # of the history, counted from its end
_FURTHER = 20  # lines of a statement after the last one that has code: comments, closing brackets


def find_lines(code: CodeType) -> tuple[str, list[str]] | None:
    """Returns a name and the lines of the text that `code` was compiled from.

    The lines have the numbers that `code` has. The name is the text's own: everything from a prompt has the same name in its
    code. `linecache` knows the text by it from then on, as it does from Python 3.13 on.
    """
    filename = code.co_filename
    if not (filename.startswith("<") and filename.endswith(">")):
        return None
    wanted = _key(code)
    for text in _programs(filename):
        if _compiles_to(text, "exec", code, wanted):
            return _known(f"{filename}-0", text)
    for number, text in _statements(filename, code):
        if _compiles_to(text, "single", code, wanted):
            return _known(f"{filename}-{number}", text)
    return None


def why_unknown(filename: str) -> tuple[str, str]:
    """Returns why the source of code with this name is not to be had, and what to do instead."""
    if filename == "<timed exec>":
        return (
            "the source of this block cannot be found: IPython keeps no text of what it runs under %%time",
            "Take %%time off the cell, or put the block into a function, and %time before its call.",
        )
    if filename != "<stdin>":
        return (
            f"the source of this block cannot be found under the name {filename!r}",
            "Run the code from a file or a notebook cell. Text that you exec needs a name that linecache knows: "
            "linecache.cache[name] = (len(text), None, text.splitlines(True), name), then exec(compile(text, name, 'exec')).",
        )
    if hasattr(sys, "ps1"):
        return (
            "the source of this block cannot be found: before Python 3.13 the interpreter keeps none of what is typed at its "
            "prompt, and the terminal's history has no text that is this code (it leaves out blank lines, and a line that "
            "repeats the one before)",
            "Put the block into a function in a file and import that, or use IPython or Python 3.13.",
        )
    return (
        "the source of this block cannot be found: the program came through a pipe, and the interpreter keeps none of it",
        "Run it from a file: python script.py, or python - < script.py.",
    )


def _known(name: str, text: str) -> tuple[str, list[str]]:
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)
    return name, lines


def _programs(filename: str) -> Iterator[str]:
    """The texts that may be the whole program."""
    if filename == "<string>":
        for argument in sys.orig_argv[1:]:
            head, is_command, tail = argument.partition("c")  # -c, -Ic, or -c with the text behind it
            yield (tail if is_command and tail and head.startswith("-") else argument) + "\n"
    if filename == "<stdin>":
        yield _standard_input()


def _statements(filename: str, code: CodeType) -> Iterator[tuple[int, str]]:
    """Returns the statements that may have been typed as the text of `code`.

    The latest statement comes first. Each has its number.
    """
    lines = _history()
    if filename == "<stdin>" and not lines:
        lines = _standard_input().splitlines()
    count = _last_line(code)
    words = [name for name in _names(code) if name.isidentifier() and not name.startswith("_")]
    for start in range(len(lines) - count, -1, -1):
        if not lines[start].strip() or lines[start][0].isspace():
            continue
        text = "\n".join(lines[start : start + count])
        if all(word in text for word in words):
            for end in range(start + count, min(start + count + _FURTHER, len(lines)) + 1):
                yield start + 1, "\n".join(lines[start:end]) + "\n"


def _history() -> list[str]:
    """Returns the typed lines without blank lines and repeated lines, as readline keeps them."""
    readline = sys.modules.get("readline")  # importing it would take over the terminal
    if readline is None:
        return []
    last = readline.get_current_history_length()
    items = (readline.get_history_item(number) for number in range(max(1, last - _MOST_LINES + 1), last + 1))
    return [line for item in items if item for line in item.split("\n")]


def _standard_input() -> str:
    """Returns the text of the file that is the standard input.

    The position in the file does not move. The text is "" if the input is not a file, or too long.
    """
    try:
        status = os.fstat(0)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            return ""
        return importlib.util.decode_source(os.pread(0, _MOST_BYTES, 0))
    except (OSError, SyntaxError, UnicodeError, AttributeError):  # no such file, not text, or no pread here
        return ""


def _compiles_to(text: str, mode: str, code: CodeType, wanted: Hashable) -> bool:
    try:
        with warnings.catch_warnings():  # what there is to warn of was said when it was typed
            warnings.simplefilter("ignore")
            made = compile(text, code.co_filename, mode, flags=future_flags(code), dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(_key(one) == wanted for one in _nested(made) if one.co_name == code.co_name)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _key(value: object) -> Hashable:
    """Returns a key that is equal for two code objects that do the same on the same lines.

    The key of a constant works in the same way.
    """
    if isinstance(value, CodeType):
        positions = getattr(value, "co_positions", None)  # from 3.11
        return (
            value.co_name,
            value.co_firstlineno,
            value.co_flags,
            (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount),
            value.co_code,
            (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars),
            _key(value.co_consts),
            tuple(value.co_lines()),
            tuple(positions()) if positions is not None else (),
        )
    if isinstance(value, (tuple, frozenset)):
        return type(value), type(value)(map(_key, value))
    return type(value), repr(value)


def _last_line(code: CodeType) -> int:
    lines = [line for one in _nested(code) for _, _, line in one.co_lines() if line is not None]
    return max(lines, default=1)


def _names(code: CodeType) -> set[str]:
    return {name for one in _nested(code) for name in (*one.co_names, *one.co_varnames, *one.co_cellvars)}
