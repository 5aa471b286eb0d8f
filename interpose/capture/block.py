"""A captured block: its text, its tree, and the names it exchanges."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType

from interpose.capture.analysis import block_reads_writes
from interpose.capture.parsing import parse_text
from interpose.capture.refuse import refuse_unsupported
from interpose.capture.source import Source, With


@dataclass(frozen=True, eq=False)
class Block:
    """The body of a ``with`` statement. Two captures of one statement give the same object.

    `source` is the body's text as `rewrite.compile_block` takes it, `first_line` its first line in `filename` (from 1),
    `indent` the columns removed from every line (0 if the text has its indentation still). `reads` and `writes` are the
    names the body may read before it assigns them, and may assign. `body` has the original file's positions and must
    not be changed. `target` is the ``as`` name; `empty` says that the body holds nothing to run.
    """

    source: str
    filename: str
    first_line: int
    indent: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    body: list[ast.stmt]
    target: str | None
    empty: bool
    origin: Source = field(repr=False)


def build_block(source: Source, node: With, index: int, code: CodeType) -> Block:
    """Makes the block of a statement's item `index`, entered by `code`.

    Further items of the statement become a ``with`` inside the block. Raises CaptureError for what a block cannot hold.
    """
    target = node.items[index].optional_vars
    if target is not None and not isinstance(target, ast.Name):
        raise source.error("the target after `as` must be a plain name", target, "Write `as tracer`.")
    if index + 1 < len(node.items) and isinstance(node, ast.AsyncWith):
        raise source.error(
            "a block cannot await, and the items after the tracer are awaited",
            node.items[index + 1].context_expr,
            "Give them an `async with` of their own, around this one.",
        )
    if index + 1 < len(node.items):
        inner, text = _with_later_items(source, node, index + 1)
        body: list[ast.stmt] = [inner]
        first_line, indent = inner.items[0].context_expr.lineno, 0
        source = source.replaced(node, inner)
        node = inner
    else:
        body = node.body
        text, first_line, indent = block_text(source.lines, body)
    in_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    refuse_unsupported(source, body, in_function=in_function, in_class=id(node) in source.classes)
    reads, writes = block_reads_writes(body)
    name = target.id if target is not None else None
    empty = all(_does_nothing(statement) for statement in body)
    return Block(text, source.filename, first_line, indent, reads, writes, body, name, empty, source)


def block_text(lines: Sequence[str], body: Sequence[ast.stmt]) -> tuple[str, int, int]:
    """Cuts statements out of a file.

    Returns their text, its first line, and the columns removed from every line. The text is dedented where that removes
    indentation and nothing else. Where a string or an expression goes on at a lower column, the text keeps its indentation
    and the last result is 0.
    """
    first, last = body[0], body[-1]
    start = min([first.lineno, *(node.lineno for node in getattr(first, "decorator_list", ()))])
    end = last.end_lineno or last.lineno
    cut = list(lines[start - 1 : end])
    column = first.col_offset
    head = cut[0].encode()[:column]
    if head.strip():  # the block stands behind the colon of its header
        tail = cut[0].encode()[column:].decode()
        if len(cut) == 1:
            return tail, start, column
        return " " * column + tail + "".join(cut[1:]), start, 0
    prefix = head.decode()
    if any(line.strip() and not line.startswith(prefix) for line in cut) or _spans_lines(body):
        return "".join(cut), start, 0
    return "".join(line[len(prefix) :] if line.strip() else "\n" for line in cut), start, column


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass)


def _spans_lines(body: Sequence[ast.stmt]) -> bool:
    """Whether a string goes over more than one line, so that its text must stay as it is."""
    strings = (
        node
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
    )
    return any(node.end_lineno != node.lineno for node in strings)


def _with_later_items(source: Source, node: With, index: int) -> tuple[ast.With, str]:
    """Returns the items from `index` on as a statement of their own, ``with later: body``.

    The indented text of the statement is returned too.
    """
    inner = ast.copy_location(ast.With(items=node.items[index:], body=node.body), node)
    first = inner.items[0].context_expr
    lines = list(source.lines[first.lineno - 1 : node.body[-1].end_lineno])
    lines[0] = lines[0].encode()[first.col_offset :].decode()
    for header in ("with ", "with ("):
        text = " " * node.col_offset + header + "".join(lines)
        try:
            parsed = parse_text("if 1:\n" + text if node.col_offset else text).body
        except SyntaxError:
            continue
        found = parsed[0].body if node.col_offset and isinstance(parsed[0], ast.If) else parsed
        if len(found) == 1 and ast.dump(found[0]) == ast.dump(inner):
            return inner, text
    raise source.error("the items after the tracer cannot be taken apart", first, "Give them a `with` of their own.")
