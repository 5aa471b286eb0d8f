"""Finds the part of a block that can be a plan, in the syntax tree, and refuses the rest.

Two parts can be plans: the body of a loop over the tracer's steps that stands at the top of the block, and a whole block without
such a loop, up to where it asks for `tracer.result`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Literal

from executor.core.programs import Unit
from executor.plan.choices import RESERVED, is_item, with_choices
from executor.plan.refuse import ATTRIBUTES, BUILTINS, STATEMENTS, Refused
from interpose.capture.analysis import block_reads_writes
from interpose.capture.rewrite import FLAGS, SAVE, parse_block, rewrite
from interpose.capture.syntax import is_steps

MOST_TEXT = 64 << 10  # bytes of a block that is parsed for a plan; a worker's interpreter stands still meanwhile
_GROW = frozenset({"append", "extend"})


@dataclass(frozen=True)
class Region:
    """A part of a block that can be a plan.

    Size: data: what one look at a block's code finds.

    Attributes:
        kind: "loop" for the body of a loop over steps, "prompt" for a block of the prompt's step alone.
        line: where it begins.
        filename: of the notebook's cell.
        target: the name that the loop binds to the step, "" in a block of the prompt's step.
        code: the statements, compiled; they run once for a step.
        rest: of a block of the prompt's step, the code after the statements, which runs at the end; None: there is none.
        digest: stands for the statements.
        reads: the names that may be read before they are assigned, with the line of their first use.
        writes: the names that are assigned.
        after: the names that the rest of the block reads.
        outside: all names that the block's text has outside of the statements, in functions too.
        grown: the names from which lists are reached that get items, or dicts that get keys (`grown`).
        uses: the dotted names that are read.
        tracers: the names that are bound to the tracer.
    """

    kind: Literal["loop", "prompt"]
    line: int
    filename: str
    target: str
    code: CodeType
    rest: CodeType | None
    digest: str
    reads: dict[str, int]
    writes: tuple[str, ...]
    after: frozenset[str]
    outside: frozenset[str]
    grown: dict[str, frozenset[int]]
    uses: tuple[Use, ...]
    tracers: frozenset[str]


@dataclass(frozen=True)
class Use:
    """A name with the attributes that follow it: `torch.nn.functional.relu` or `torch` alone.

    Attributes:
        names: the parts.
        line: where it stands.
    """

    names: tuple[str, ...]
    line: int


def regions(unit: Unit) -> list[Region]:
    """Return the parts of a block that can be plans, in their order.

    A text is parsed once, however many requests have it.

    Raises:
        Refused: a part cannot be a plan; the first reason, with the notebook's line.
    """
    found = _regions(unit)
    if isinstance(found, Refused):
        raise found.again()
    return list(found)


@functools.lru_cache(256)
def _regions(unit: Unit) -> tuple[Region, ...] | Refused:
    try:
        return tuple(_found(unit))
    except Refused as refused:
        return refused.again()


def _found(unit: Unit) -> list[Region]:
    if len(unit.source) > MOST_TEXT:
        raise Refused(
            unit.first_line, f"the block has more than {MOST_TEXT >> 10} KiB of text", "cut it into functions"
        )
    tracers = frozenset(unit.tracers)
    tree = rewrite(parse_block(unit.source, unit.filename, unit.first_line, unit.indent), tracers)
    body = tree.body
    loops = [node for node in body if isinstance(node, ast.For) and is_steps(node.iter, tracers)]
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and is_steps(node.iter, tracers) and node not in loops:
            raise Refused(
                node.lineno, "a loop over steps inside another statement", "write the loop at the top of the block"
            )
    if not loops:
        end = next((i for i, node in enumerate(body) if _asks_result(node, tracers)), len(body))
        if not end:
            raise Refused(unit.first_line, "the block asks for nothing before tracer.result", "")
        return [_region("prompt", body[0].lineno, unit, "", body[:end], body[end:])]
    found = []
    for node in loops:
        if node.orelse:
            raise Refused(node.orelse[0].lineno, "a loop over steps with an else", "write it after the loop")
        if not isinstance(node.target, ast.Name):
            raise Refused(node.lineno, "a loop over steps binds one name", "write: for step in tracer.iter[...]")
        rest = body[body.index(node) + 1 :]
        region = _region("loop", node.lineno, unit, node.target.id, node.body, rest)
        others = (part for one in body if one is not node for part in ast.walk(one))
        outside = frozenset(part.id for part in others if isinstance(part, ast.Name))
        found.append(replace(region, outside=outside))
    return found


def _asks_result(node: ast.stmt, tracers: frozenset[str]) -> bool:
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == "result"
        and isinstance(part.value, ast.Name)
        and part.value.id in tracers
        for part in ast.walk(node)
    )


def _region(
    kind: Literal["loop", "prompt"],
    line: int,
    unit: Unit,
    target: str,
    body: Sequence[ast.stmt],
    rest: Sequence[ast.stmt],
) -> Region:
    check(body)
    reads, writes = block_reads_writes(body)
    lines = _first_uses(body)
    if not RESERVED.isdisjoint(lines):
        raise Refused(line, f"the name {min(RESERVED & lines.keys())} is the plans' own", "use another name")
    after, _ = block_reads_writes(rest)
    once = ast.For(
        target=ast.Name(id="_", ctx=ast.Store()),
        iter=ast.Tuple(elts=[ast.Constant(value=None)], ctx=ast.Load()),
        body=with_choices(body),
        orelse=[],
    )
    filename = unit.filename
    module = ast.fix_missing_locations(ast.Module(body=[ast.copy_location(once, body[0])], type_ignores=[]))
    code = compile(module, filename, "exec", flags=FLAGS, dont_inherit=True)
    behind = None
    if kind == "prompt" and rest:
        behind = compile(ast.Module(list(rest), type_ignores=[]), filename, "exec", flags=FLAGS, dont_inherit=True)
    text = ast.dump(ast.Module(body=list(body), type_ignores=[]), include_attributes=True)
    digest = hashlib.sha256(f"{kind} {target} {filename} {text}".encode()).hexdigest()
    read = {name: lines.get(name, line) for name in reads if name not in (target, SAVE)}
    found = tuple(uses(body))
    tracers = frozenset(unit.tracers)
    return Region(
        kind,
        line,
        filename,
        target,
        code,
        behind,
        digest,
        read,
        writes,
        frozenset(after),
        frozenset(after),
        grown(body),
        found,
        tracers,
    )


def _first_uses(body: Sequence[ast.stmt]) -> dict[str, int]:
    lines: dict[str, int] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
    return lines


def uses(body: Sequence[ast.AST]) -> Iterator[Use]:
    """Return every name of some statements with the attributes that follow it."""
    todo: list[ast.AST] = list(reversed(body))
    while todo:
        node = todo.pop()
        names: list[str] = []
        at = node
        while isinstance(at, ast.Attribute):
            names.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name) and isinstance(at.ctx, ast.Load):
            yield Use((at.id, *reversed(names)), node.lineno)  # type: ignore[attr-defined]
        else:
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


def grown(body: Sequence[ast.AST]) -> dict[str, frozenset[int]]:
    """Return the names from which lists are reached that get items, or dicts that get keys.

    Returns:
        For each name, how many subscripts stand between it and such a list or dict.
    """
    found: dict[str, frozenset[int]] = {}
    for statement in body:
        for node in ast.walk(statement):
            at: ast.AST | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROW:
                at = node.func.value
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
                at = node.target
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                at = node.value
            depth = 0
            while isinstance(at, ast.Subscript):
                at, depth = at.value, depth + 1
            if isinstance(at, ast.Name):
                found[at.id] = found.get(at.id, frozenset()) | {depth}
    return found


def check(body: Sequence[ast.stmt], *, function: bool = False) -> None:
    """Refuse statements that have what no plan has.

    Args:
        function: whether they are the body of a function, which may return.

    Raises:
        Refused: the first such place, in the order of lines.
    """
    refusals: list[Refused] = []
    checker = _Check(refusals, function)
    for statement in body:
        checker.visit(statement)
    if refusals:
        raise min(refusals, key=lambda one: one.line)


class _Check(ast.NodeVisitor):
    """Finds what no plan has."""

    def __init__(self, refusals: list[Refused], function: bool) -> None:
        self._refusals = refusals
        self._function = function
        self._loops = 0

    def _refuse(self, node: ast.AST, what: str, instead: str) -> None:
        self._refusals.append(Refused(getattr(node, "lineno", 0), what, instead))

    def visit(self, node: ast.AST) -> None:
        reason = STATEMENTS.get(type(node).__name__)
        if reason is not None and not (isinstance(node, ast.With) and _only_no_grad(node)):
            self._refuse(node, *reason)
        super().visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.target)
        self.visit(node.iter)
        self._loops += 1
        for statement in node.body:
            self.visit(statement)
        self._loops -= 1
        for statement in node.orelse:
            self.visit(statement)

    def visit_Break(self, node: ast.Break) -> None:
        if not self._loops:
            self._refuse(node, "a break ends the loop over steps", "bound the loop: tracer.iter[a:b]")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._loops = self._loops, 1
        self.generic_visit(node)
        self._loops = outer

    def visit_Attribute(self, node: ast.Attribute) -> None:
        reason = ATTRIBUTES.get(node.attr)
        if reason is not None:
            # The attribute's own line: a chain of calls may begin lines above it.
            line = node.end_lineno or node.lineno
            self._refusals.append(Refused(line, f".{node.attr} {reason[0]}", reason[1]))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            self._refuse(node, *BUILTINS[node.func.id])
        if not self._function and is_item(node):
            assert isinstance(node.func, ast.Attribute)
            self.visit(node.func.value)  # a decision may take it
        else:
            self.generic_visit(node)


def _only_no_grad(node: ast.With) -> bool:
    return all(
        item.optional_vars is None and ast.unparse(item.context_expr) == "torch.no_grad()" for item in node.items
    )
