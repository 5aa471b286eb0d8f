"""Compiles the text of a captured block, with the notebook's own line numbers.

The same rewriting runs in the worker, for blocks that run inside the model, and in the notebook, for the outer block that
only prepares invokes. It changes the syntax tree and nothing else: no builtin is patched, so ``x.save()`` works on a list,
a number or a string without any of those types knowing about it.

Code compiled here expects two names in the namespace it is executed in: `SAVE`, called with the value to keep, and
`GUARD`, called without arguments first thing in every ``except`` handler, where it re-raises the exceptions by which the
worker ends a block, so that a bare ``except:`` cannot swallow them.
"""

from __future__ import annotations
import __future__

import ast
import types
from typing import Any

from interpose.capture.parsing import parse_text
from interpose.capture.syntax import bound_names, is_steps

SAVE = "__interpose_save__"
GUARD = "__interpose_guard__"
STEP = "__interpose_step__"

# Annotations stay text: they often name things that only the notebook has, and nothing in a block needs their values.
FLAGS = __future__.annotations.compiler_flag


def compile_block(
    source: str, filename: str, first_line: int, indent: int, tracers: frozenset[str] = frozenset()
) -> types.CodeType:
    """Compiles a block's statements to module code, to be executed in one plain dict.

    `source` is either dedented by `indent` columns on every line, or the file's own text with its indentation still there
    (the form used where a dedent would change a string that spans lines); the first character tells which. `tracers` are
    the names bound to the tracer, whose ``with tracer.iter[...]`` blocks become loops.

    Raises SyntaxError, with the notebook's line, for a text that is not Python or uses what a block cannot hold.
    """
    tree = rewrite(parse_block(source, filename, first_line, indent), tracers)
    return compile(tree, filename, "exec", flags=FLAGS, dont_inherit=True)


def parse_block(source: str, filename: str, first_line: int, indent: int) -> ast.Module:
    """Parses a block's text, dedented or not, and gives every node its position in `filename`."""
    if source[:1] in (" ", "\t"):
        tree = parse_text("if 1:\n" + source, filename)
        wrapper = tree.body[0]
        if len(tree.body) != 1 or not isinstance(wrapper, ast.If):
            raise SyntaxError(f"{filename}, line {first_line}: the block's text does not hold together")
        tree.body = wrapper.body
        move(tree, first_line - 2, 0, 0)
    else:
        tree = parse_text(source, filename)
        move(tree, first_line - 1, indent, indent)
    return tree


def rewrite(tree: ast.Module, tracers: frozenset[str] = frozenset(), *, keep_nonlocal: bool = False) -> ast.Module:
    """Rewrites a block's tree in place.

    It changes saves, guards and step loops, and makes the block's scope the module's. With `keep_nonlocal` the block's names
    stay variables of a function around it.
    """
    Rewriter(tracers, keep_nonlocal).visit(tree)
    return ast.fix_missing_locations(tree)


def move(tree: ast.AST, lines: int, first_columns: int, other_columns: int) -> None:
    """Shifts every position by `lines` and by a number of columns.

    The columns may differ on the text's first line.
    """
    node: Any
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.col_offset = max(0, node.col_offset + (first_columns if node.lineno == 1 else other_columns))
            node.lineno = max(1, node.lineno + lines)
        end_line = getattr(node, "end_lineno", None)
        if end_line is not None:
            node.end_col_offset = max(0, node.end_col_offset + (first_columns if end_line == 1 else other_columns))
            node.end_lineno = max(1, end_line + lines)


class Rewriter(ast.NodeTransformer):
    """Rewrites a tree whose top level is a block."""

    def __init__(self, tracers: frozenset[str], keep_nonlocal: bool):
        self._tracers = tracers
        self._keep_nonlocal = keep_nonlocal
        self._functions: list[set[str]] = []  # the names that each enclosing function binds, outermost first
        self._depth = 0  # of functions and classes; 0 is the block's own level

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "save" and not node.args and not node.keywords:
            keep = ast.copy_location(ast.Name(id=SAVE, ctx=ast.Load()), node)
            return ast.copy_location(ast.Call(func=keep, args=[function.value], keywords=[]), node)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        call = ast.Call(func=ast.Name(id=GUARD, ctx=ast.Load()), args=[], keywords=[])
        guard = ast.copy_location(ast.Expr(value=call), node.body[0])
        node.body.insert(0, ast.fix_missing_locations(guard))
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        return self._loops(node)

    def _loops(self, node: ast.With) -> ast.stmt:
        for index, item in enumerate(node.items):
            if not is_steps(item.context_expr, self._tracers):
                continue
            after = node.items[index + 1 :]
            body = [self._loops(_with(node, after, node.body))] if after else node.body
            target = item.optional_vars or ast.Name(id=STEP, ctx=ast.Store())
            loop = ast.copy_location(ast.For(target=target, iter=item.context_expr, body=body, orelse=[]), node)
            return _with(node, node.items[:index], [loop]) if index else loop
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if self._depth:
            return node
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST | list[ast.AST]:
        if self._keep_nonlocal:
            return node
        # What is the block's own name lives in the namespace the code runs in, which for nested functions is global.
        outer = set().union(*self._functions[:-1]) if self._functions else set()
        inside = [name for name in node.names if name in outer]
        block = [name for name in node.names if name not in outer]
        nodes: list[ast.AST] = []
        if inside:
            nodes.append(ast.copy_location(ast.Nonlocal(names=inside), node))
        if block:
            nodes.append(ast.copy_location(ast.Global(names=block), node))
        return nodes

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._functions.append(bound_names(node))
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        self._functions.pop()
        return node


def _with(node: ast.With, items: list[ast.withitem], body: list[ast.stmt]) -> ast.With:
    return ast.copy_location(ast.With(items=items, body=body), node)
