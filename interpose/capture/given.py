"""Makes a block of a function's body, or of a text, where no ``with`` statement stands."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Mapping
from typing import Any

from interpose.capture.analysis import block_reads_writes
from interpose.capture.block import Block, block_text
from interpose.capture.errors import CaptureError
from interpose.capture.functions import function_source
from interpose.capture.refuse import refuse_unsupported
from interpose.capture.scope import Scope
from interpose.capture.source import Source, load, parse

TEXT = "<block>"  # the file name of a block that is given as a text


class GivenScope(Scope):
    """The names of a block that is given.

    Names are never assigned there, because the block's values have nowhere to go.
    """

    def __init__(self, frame: types.FrameType, names: Mapping[str, object], module: dict[str, Any]) -> None:
        super().__init__(frame)
        self.globals = module
        self._names = names

    def lookup(self, name: str) -> object:
        return self._names[name] if name in self._names else self.globals[name]

    def assign(self, values: dict[str, object]) -> None:
        pass

    def is_local(self, name: str) -> bool:
        return name not in self.globals


def block_of_function(function: types.FunctionType) -> tuple[Block, dict[str, object]]:
    """Returns a function's body as a block, and the values of its closure by name.

    Raises CaptureError if the function has no source, is no plain function, or holds what a block cannot hold.
    """
    code = function.__code__
    found = function_source(function)
    source = load(code.co_filename, function.__globals__, code) if found is not None else None
    if found is None or source is None or not isinstance(found.body, ast.FunctionDef):
        raise CaptureError(
            f"{function.__name__} has no source that could be read as a block",
            filename=code.co_filename,
            line=code.co_firstlineno,
            text="",
            hint="Give a function that a file or a cell defines with `def`, or a text.",
        )
    body = found.body.body
    if ast.get_docstring(found.body) is not None and len(body) > 1:
        body = body[1:]
    closure: dict[str, object] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:
            continue
    return _block(source, body), closure


def block_of_text(text: str) -> Block:
    """Returns a text as a block; its lines are numbered from 1.

    Raises CaptureError if the text is no Python, or holds what a block cannot hold.
    """
    lines = inspect.cleandoc("\n" + text).splitlines(keepends=True) or ["pass\n"]
    try:
        source = parse(TEXT, lines)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise CaptureError(f"the text is no Python: {error}", filename=TEXT, line=line, text="", hint="") from None
    body = source.tree.body
    if not body:
        raise CaptureError("the text has no statement", filename=TEXT, line=1, text="", hint="")
    return _block(source, body)


def _block(source: Source, body: list[ast.stmt]) -> Block:
    refuse_unsupported(source, body, in_function=True, in_class=False)
    text, first_line, indent = block_text(source.lines, body)
    reads, writes = block_reads_writes(body)
    return Block(text, source.filename, first_line, indent, reads, writes, body, None, False, source)
