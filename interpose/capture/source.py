"""Finds the source of a running frame's ``with`` statement.

The way goes from a frame and its position to a node of a parsed file. A frame that is inside ``__enter__`` stands at one
instruction, and that instruction belongs to one item of one ``with`` statement. Its line gives the statement, as no two
statements with a block share a line. Where a statement has several items, the instruction's columns tell them apart if the
interpreter records them, else the order of the instructions does.
"""

from __future__ import annotations

import ast
import dis
import linecache
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

from interpose.capture.errors import CaptureError
from interpose.capture.fileless import find_lines
from interpose.capture.parsing import parse_text
from interpose.capture.recent import Recent

_ENTER = frozenset(
    code for name, code in dis.opmap.items() if name in ("SETUP_WITH", "BEFORE_WITH", "BEFORE_ASYNC_WITH")
)
With = ast.With | ast.AsyncWith


@dataclass(frozen=True, eq=False)
class Source:
    """One file or cell, parsed."""

    filename: str
    lines: list[str]  # with their line ends
    tree: ast.Module
    withs: dict[int, With] = field(default_factory=dict)  # by the line they start on, and by each item's line
    classes: frozenset[int] = frozenset()  # id() of the nodes in `withs` that stand in a class body or a method
    named: str = ""  # what its code calls it, if otherwise than `filename`

    def holds(self, code: CodeType) -> bool:
        """Whether `code` says that it was compiled from this file or cell."""
        return code.co_filename == (self.named or self.filename)

    def line(self, number: int) -> str:
        """The text of a line, counted from 1; empty past the end."""
        return self.lines[number - 1].rstrip("\n") if 0 < number <= len(self.lines) else ""

    def replaced(self, node: With, other: With) -> Source:
        """This source with another statement in the place of `node`."""
        withs = {line: other if found is node else found for line, found in self.withs.items()}
        classes = self.classes | {id(other)} if id(node) in self.classes else self.classes
        return replace(self, withs=withs, classes=classes)

    def error(self, message: str, node_or_line: ast.AST | int, hint: str = "") -> CaptureError:
        """A CaptureError that points into this source."""
        line = node_or_line if isinstance(node_or_line, int) else getattr(node_or_line, "lineno", 1)
        return CaptureError(message, filename=self.filename, line=line, text=self.line(line), hint=hint)


_parsed: Recent[Source] = Recent(256)
_fileless: Recent[tuple[Source | None]] = Recent(1024)  # by code object


def load(filename: str, module_globals: dict[str, Any] | None = None, code: CodeType | None = None) -> Source | None:
    """Returns a file's or a cell's parsed source, or None without source.

    A text is parsed once, as long as it stays the same. Raises SyntaxError if the text is not Python.
    """
    lines = linecache.getlines(filename, module_globals)
    if not lines and code is not None:
        from_code = getattr(linecache, "_getlines_from_code", None)  # later 3.13: the sources of -c and the REPL
        lines = from_code(code) if from_code is not None else []
    if not lines:
        return _load_fileless(code) if code is not None else None
    return _known(filename, lines)


def _load_fileless(code: CodeType) -> Source | None:
    known = _fileless.get(code)
    if known is None:
        found = find_lines(code)
        known = _fileless.put(code, (_known(*found, named=code.co_filename) if found is not None else None,))
    return known[0]


def _known(filename: str, lines: list[str], named: str = "") -> Source:
    known = _parsed.get(None, filename)
    if known is not None and (known.lines is lines or known.lines == lines):
        return known
    return _parsed.put(None, parse(filename, lines, named), filename)


def parse(filename: str, lines: list[str], named: str = "") -> Source:
    """Parses lines and notes where the ``with`` statements are.

    `named` is the name that their code has for them, if it is another.
    """
    tree = parse_text("".join(lines), filename)
    withs: dict[int, With] = {}
    classes: set[int] = set()
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, in_class = stack.pop()
        if isinstance(node, With):
            withs.update({item.context_expr.lineno: node for item in node.items})
            withs[node.lineno] = node
            if in_class:
                classes.add(id(node))
        in_class = in_class or isinstance(node, ast.ClassDef)
        stack.extend((child, in_class) for child in ast.iter_child_nodes(node))
    return Source(filename, lines, tree, withs, frozenset(classes), named)


def entry_offset(frame: FrameType) -> int | None:
    """Returns the offset of the instruction with which a frame enters a ``with`` block.

    None: the frame does something else.
    """
    raw, offset = frame.f_code.co_code, frame.f_lasti
    while 0 <= offset < len(raw) and raw[offset] == dis.EXTENDED_ARG:  # where 3.10 stands if the block is long
        offset += 2
    return offset if 0 <= offset < len(raw) and raw[offset] in _ENTER else None


def find_with(source: Source, code: CodeType, offset: int, line: int) -> tuple[With, int] | None:
    """Returns the statement and the item that the instruction at `offset` enters.

    The item is an index. None: no statement has the instruction.
    """
    node = source.withs.get(line)
    if node is None:
        return None
    candidates = [index for index, item in enumerate(node.items) if line in (node.lineno, item.context_expr.lineno)]
    if len(candidates) == 1:
        return node, candidates[0]
    here = _position(code, offset)
    exact = [index for index in candidates if _span(node.items[index].context_expr) == here]
    if len(exact) == 1:
        return node, exact[0]
    # A ``finally`` block is compiled more than once, each copy with all the items in order.
    raw, lines = code.co_code, _lines(code)
    same = [at for at in range(0, len(raw), 2) if raw[at] in _ENTER and lines[at // 2] == line]
    return node, candidates[same.index(offset) % len(candidates)]


def _position(code: CodeType, offset: int) -> tuple[int | None, ...]:
    positions = getattr(code, "co_positions", None)  # from 3.11
    return tuple(list(positions())[offset // 2]) if positions is not None else ()


def _lines(code: CodeType) -> list[int | None]:
    """The line of each two-byte code unit."""
    lines: list[int | None] = []
    for start, end, line in code.co_lines():
        lines.extend([line] * ((end - start) // 2))
    return lines


def _span(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
