"""Rewrites decisions in a loop's body, so that a traced step can take both ways of an `if`.

Python asks for the truth of a value where it decides, and a traced tensor has none. So an `if` becomes a loop over its ways, an
`a if b else c` becomes a call with two functions, and `float(x)`, `int(x)`, `bool(x)` and `x.item()` become calls. The functions
that are called (`executor.plan.decide`) leave a decision that depends on no tensor as it was. Bodies of functions stay as they
are.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import Any

WAYS, WAY = "__interpose_ways__", "__interpose_way__"
EITHER, BOTH, ANY, NOT = "__interpose_either__", "__interpose_both__", "__interpose_any__", "__interpose_not__"
NUMBER, ITEM, SAME, CHAIN = "__interpose_number__", "__interpose_item__", "__interpose_same__", "__interpose_chain__"
RESERVED = frozenset({WAYS, WAY, EITHER, BOTH, ANY, NOT, NUMBER, ITEM, SAME, CHAIN})
_NUMBERS = frozenset({"float", "int", "bool"})
_SIGNS: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def with_choices(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return a copy of statements whose decisions are rewritten."""
    chooser = _Chooser()
    return [ast.fix_missing_locations(chooser.visit(copy.deepcopy(statement))) for statement in body]


def is_item(node: ast.Call) -> bool:
    """Return whether a call is `x.item()`."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args and not node.keywords


class _Chooser(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, _SCOPES) else super().visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        leaves = any(_leaving(node.body)) or any(_leaving(node.orelse))
        if leaves:
            self.generic_visit(node)
            return node
        test = self._test(node.test)
        body = [self.visit(one) for one in node.body]
        orelse = [self.visit(one) for one in node.orelse]
        way = ast.copy_location(ast.Name(id=WAY, ctx=ast.Load()), node)
        inner = ast.copy_location(ast.If(test=way, body=body, orelse=orelse), node)
        target = ast.Name(id=WAY, ctx=ast.Store())
        return ast.copy_location(ast.For(target=target, iter=_call(WAYS, node, test), body=[inner], orelse=[]), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if _binds(node):
            self.generic_visit(node)
            return node
        ways = [_later(self.visit(way)) for way in (node.body, node.orelse)]
        return _call(EITHER, node, self._test(node.test), *ways)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if is_item(node):
            assert isinstance(function, ast.Attribute)
            return _call(ITEM, node, function.value)
        named = isinstance(function, ast.Name) and function.id in _NUMBERS
        if named and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred) and not node.keywords:
            return _call(NUMBER, node, function, node.args[0])
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            same = _call(SAME, node, node.left, node.comparators[0])
            return same if isinstance(node.ops[0], ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), same), node)
        return node

    def _test(self, node: ast.expr) -> ast.expr:
        """Return a condition in which `and`, `or` and `not` take traced values."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _call(NOT, node, self._test(node.operand))
        if isinstance(node, ast.BoolOp) and not any(map(_binds, node.values[1:])):
            name = BOTH if isinstance(node.op, ast.And) else ANY
            *others, made = [self._test(one) for one in node.values]
            for one in reversed(others):
                made = _call(name, node, one, _later(made))
            return made
        made_node: ast.expr = self.visit(node)
        if (
            isinstance(made_node, ast.Compare)
            and len(made_node.ops) > 1
            and not any(map(_binds, made_node.comparators))
        ):
            signs = [_SIGNS.get(type(one)) for one in made_node.ops]
            if None not in signs:
                first, *others = made_node.comparators
                constants: list[ast.expr] = [ast.copy_location(ast.Constant(value=sign), node) for sign in signs]
                named = ast.copy_location(ast.Tuple(elts=constants, ctx=ast.Load()), node)
                return _call(CHAIN, node, named, made_node.left, first, *map(_later, others))
        return made_node


def _call(name: str, at: ast.expr | ast.stmt, *args: ast.expr) -> ast.expr:
    function = ast.copy_location(ast.Name(id=name, ctx=ast.Load()), at)
    return ast.copy_location(ast.Call(func=function, args=list(args), keywords=[]), at)


def _later(value: ast.expr) -> ast.expr:
    """Return a function without arguments that gives a value."""
    none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(args=none, body=value), value)


def _binds(node: ast.AST) -> bool:
    """Return whether an expression assigns a name, which a function would keep for itself."""
    return any(isinstance(one, ast.NamedExpr) for one in ast.walk(node))


def _leaving(body: Sequence[ast.AST], looping: bool = False) -> Iterator[ast.AST]:
    """Yield the statements that leave what some statements stand in."""
    for node in body:
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break | ast.Continue) and not looping):
            yield node
        elif isinstance(node, ast.For | ast.While):
            yield from _leaving(node.body, True)
            yield from _leaving(node.orelse, looping)
        elif not isinstance(node, _SCOPES):
            yield from _leaving(list(ast.iter_child_nodes(node)), looping)
