"""Compares source text with running code.

It guards against files that were edited after their import. The statements found in the text are compiled on their own and
compared with the instructions of the running code on the same lines. Every name, constant and operator of the text must occur
in the code, and every instruction of the code must have a position that the text accounts for. Tools that rewrite code as it
is imported only add to it (pytest does, in ``assert`` statements, which are left out), so such code passes.
"""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from types import CodeType

from interpose.capture.flags import future_flags
from interpose.capture.source import With

_NAMES = frozenset({*dis.hasname, *dis.haslocal, *dis.hasfree})
# Two variables in one instruction, from 3.13.
_PAIRS = frozenset(name for name in dis.opmap if name.count("_FAST") == 2)
_OPERATORS = ("BINARY_", "INPLACE_", "UNARY_", "COMPARE_", "CONTAINS_", "IS_OP")
_MANGLED = re.compile(r"^_[^_]\w*?__(?=\w*[^_]$|\w*[^_]_$)")  # the class's name before a private one

Position = tuple[int, ...]  # (line, end line, column, end column), or (line,) where columns are not recorded


def same_statements(code: CodeType, statements: Sequence[ast.stmt]) -> bool:
    """Whether `code` holds `statements`, at the positions they have.

    Statements that mean nothing on their own, such as a ``return``, cannot be told and count as the same: no block may hold
    them anyway.
    """
    # Inside a `with`, as there: what the compiler drops as unreachable depends on it.
    item = ast.withitem(context_expr=ast.Constant(None))
    compiled = _compile(code, [ast.With(items=[item], body=copy.deepcopy(list(statements)))])
    return compiled is None or _agree(code, compiled, list(statements))


def same_extent(code: CodeType, offset: int, node: With) -> bool:
    """Returns whether a block's instructions lie on the lines of its statements.

    The block is the one entered at `offset`. The first instruction on a line of the header, after some on other lines, is the
    one that leaves the block.
    """
    header = range(node.lineno, node.body[0].lineno)  # empty for a block behind its header's colon
    end = node.body[-1].end_lineno or 0
    inside = False
    for instruction, line, _ in _instructions(code):
        if instruction.offset <= offset:
            continue
        if inside and line in header:
            return True
        inside = inside or line >= header.stop
        if header and line > end:
            return False
    return True


def same_function(
    code: CodeType, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, *, exactly: bool = False
) -> bool:
    """Whether `code` is the code of the function that `node` defines.

    With `exactly`, code that has more in it than the text does not pass; this tells several on one line apart.
    """
    alone = copy.deepcopy(node)
    alone.args.defaults = [ast.copy_location(ast.Constant(None), value) for value in alone.args.defaults]
    alone.args.kw_defaults = [
        value and ast.copy_location(ast.Constant(None), value) for value in alone.args.kw_defaults
    ]
    if not isinstance(alone, ast.Lambda):  # a decorator's line is where the function's code begins
        alone.decorator_list = [ast.copy_location(ast.Constant(None), item) for item in alone.decorator_list]
    module = _compile(
        code, [ast.copy_location(ast.Expr(value=alone), alone) if isinstance(alone, ast.Lambda) else alone]
    )
    compiled = (
        [constant for constant in module.co_consts if isinstance(constant, CodeType)] if module is not None else []
    )
    if not compiled or _parameters(compiled[0]) != _parameters(code):
        return False
    body = node.body if isinstance(node.body, list) else [node.body]
    return _agree(code, compiled[0], body) and (not exactly or _same_facts(code, compiled[0], node))


def _parameters(code: CodeType) -> tuple[int, int, int, tuple[str, ...]]:
    stars = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    count = code.co_argcount + code.co_kwonlyargcount + stars.bit_count()
    return code.co_argcount, code.co_kwonlyargcount, stars, code.co_varnames[:count]


def _same_facts(code: CodeType, compiled: CodeType, node: ast.AST) -> bool:
    lines = range(getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) + 1)
    return _facts(code, lines) == _facts(compiled, lines)


def _compile(code: CodeType, statements: list[ast.stmt]) -> CodeType | None:
    """Compiles statements by themselves the way `code` was compiled."""
    tree = _Plain().visit(ast.Module(body=statements, type_ignores=[]))
    try:
        return compile(ast.fix_missing_locations(tree), "", "exec", flags=future_flags(code), dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _agree(code: CodeType, compiled: CodeType, nodes: Sequence[ast.stmt | ast.expr]) -> bool:
    """Returns whether running code has all that the compiled text of `nodes` has.

    Between their ends it must have nothing that the text lacks.
    """
    first, last = nodes[0], nodes[-1]
    start = first.lineno, first.col_offset
    decorators = [node.lineno for node in getattr(first, "decorator_list", ())]
    if decorators:
        start = min(decorators), 0
    # Nothing else follows a statement on its last line; an expression may have others after it.
    end = last.end_lineno or last.lineno, (last.end_col_offset or 0) if isinstance(last, ast.expr) else sys.maxsize
    lines = range(start[0], end[0] + 1)
    text_facts, text_positions = _facts(compiled, lines)
    code_facts, code_positions = _facts(code, lines)
    unexplained = [position for position in code_positions - text_positions if _inside(position, start, end)]
    allowed = [_full_lines(node) for node in _allowed(nodes)] if unexplained else []
    return text_facts <= code_facts and all(
        any(_inside(position, span[:2], span[2:]) for span in allowed) for position in unexplained
    )


class _Plain(ast.NodeTransformer):
    """Leaves out what compiles differently here and there, and keeps the names it mentions.

    pytest compiles an ``assert`` to something else. A block's own annotations are evaluated in a module and not in a
    function. ``nonlocal`` needs the function around it.
    """

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        names: list[ast.expr] = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
        names = [name for name in names if isinstance(getattr(name, "ctx", None), ast.Load)]
        mention = ast.Expr(value=ast.Tuple(elts=names, ctx=ast.Load()))
        return node if sys.flags.optimize else ast.copy_location(mention, node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.copy_location(ast.Global(names=node.names), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return _PlainInside().generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return _PlainInside().generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return _PlainInside().generic_visit(node)


class _PlainInside(_Plain):
    """The same for the inside of functions and classes, whose annotations are alike everywhere."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.generic_visit(node)


def _allowed(statements: Iterable[ast.AST]) -> list[ast.AST]:
    """The nodes whose instructions may differ."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return [node for node in nodes if isinstance(node, (ast.Assert, ast.AnnAssign))]


def _facts(code: CodeType, lines: range) -> tuple[set[tuple[str, str]], set[Position]]:
    """Returns what the instructions on `lines` name and compute, with their positions.

    Nested code objects are among them.
    """
    facts: set[tuple[str, str]] = set()
    positions: set[Position] = set()
    labels = {code.co_name, *(constant.co_name for constant in code.co_consts if isinstance(constant, CodeType))}
    for instruction, line, position in _instructions(code):
        if line not in lines:
            continue
        positions.add(position)
        value = instruction.argval
        if instruction.opcode in _NAMES or instruction.opname in _PAIRS:
            names = value if isinstance(value, tuple) else (value,)
            facts.update(("name", _MANGLED.sub("__", name)) for name in names)
        elif isinstance(value, CodeType):
            inner_facts, inner_positions = _facts(value, lines)
            facts |= inner_facts
            positions |= inner_positions
        elif instruction.opname in ("LOAD_CONST", "RETURN_CONST", "KW_NAMES"):
            facts.update(("constant", text) for text in _constants(value) if not _is_label(value, labels))
        elif instruction.opname.startswith(_OPERATORS):
            facts.add((instruction.opname, instruction.argrepr))
    return facts, positions


def _instructions(code: CodeType) -> Iterable[tuple[dis.Instruction, int, Position]]:
    starts: dict[int, int | None] = {}
    for start, end, line in code.co_lines():
        starts.update(dict.fromkeys(range(start, end, 2), line))
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset)
        if line is None:
            continue
        spot = getattr(instruction, "positions", None)
        if spot is None or spot.col_offset is None or spot.end_lineno is None or spot.end_col_offset is None:
            yield instruction, line, (line,)
        else:
            yield instruction, line, (line, spot.end_lineno, spot.col_offset, spot.end_col_offset)


def _constants(value: object) -> list[str]:
    """The plain constants in a constant; None is everywhere and tells nothing."""
    if isinstance(value, (tuple, frozenset)):
        return [text for element in value for text in _constants(element)]
    if value is None or isinstance(value, CodeType):
        return []
    return [f"{type(value).__name__} {value!r}"]


def _is_label(value: object, labels: set[str]) -> bool:
    """Returns whether a constant is the qualified name of a function or class.

    Such a name depends on the code around it.
    """
    return isinstance(value, str) and ("<" in value or value.rpartition(".")[2] in labels)


def _full_lines(node: ast.AST) -> tuple[int, int, int, int]:
    assert isinstance(node, ast.stmt)
    return node.lineno, 0, node.end_lineno or node.lineno, sys.maxsize


def _inside(position: Position, start: tuple[int, ...], end: tuple[int, ...]) -> bool:
    if len(position) == 1:
        return start[0] <= position[0] <= end[0]
    line, end_line, column, end_column = position
    return (line, column) >= tuple(start) and (end_line, end_column) <= tuple(end)
