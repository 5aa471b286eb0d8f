"""What single pieces of Python's syntax mean for names.

Nothing here follows the flow of a program; `interpose.capture.analysis` does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_SWALLOW = frozenset({"suppress", "raises", "assertRaises", "assertRaisesRegex"})


def is_constant(node: ast.expr) -> bool:
    """Returns whether an expression always has the same value.

    Such an expression makes no mutable object.
    """
    if isinstance(node, ast.UnaryOp):
        return is_constant(node.operand)
    if isinstance(node, ast.Tuple):
        return all(is_constant(element) for element in node.elts)
    return isinstance(node, ast.Constant)


def is_steps(node: ast.expr, tracers: frozenset[str] | None = None) -> bool:
    """Returns whether an expression is ``T.iter[...]`` or ``T.all()`` for a tracer T.

    T is one of `tracers`, or any name if `tracers` is None.
    """
    if isinstance(node, ast.Subscript):
        attribute, name = node.value, "iter"
    elif isinstance(node, ast.Call) and not node.args and not node.keywords:
        attribute, name = node.func, "all"
    else:
        return False
    if not (isinstance(attribute, ast.Attribute) and attribute.attr == name and isinstance(attribute.value, ast.Name)):
        return False
    return tracers is None or attribute.value.id in tracers


def bound_names(scope: Function | ast.ClassDef) -> set[str]:
    """Returns the names that belong to a function or class itself.

    These are its parameters and the names its body binds, without global and nonlocal names.
    """
    names: set[str] = set()
    if isinstance(scope, Function):
        arguments = scope.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        names = {parameter.arg for parameter in parameters if parameter is not None}
    declared: set[str] = set()
    body: list[ast.AST] = list(scope.body) if isinstance(scope.body, list) else [scope.body]
    for node in walk_level(body):
        names.update(binds(node))
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            declared.update(node.names)
    return names - declared


def walk_level(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Walks nodes in document order.

    Of nested scopes only the parts are visited that belong to the scope around them. That is, of functions and classes what
    is evaluated where they are defined, and of comprehensions all but the targets (an assignment expression inside a
    comprehension binds in the scope around it).
    """
    stack = list(nodes)[::-1]
    while stack:
        node = stack.pop()
        yield node
        children: list[ast.AST | None]
        if isinstance(node, Function):
            children = [*getattr(node, "decorator_list", ()), *node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.ClassDef):
            children = [*node.decorator_list, *node.bases, *node.keywords]
        elif isinstance(node, ast.comprehension):
            children = [node.iter, *node.ifs]
        else:
            children = [*ast.iter_child_nodes(node)]
        stack.extend(child for child in children[::-1] if child is not None)


def binds(node: ast.AST) -> list[str]:
    """The names that one node by itself binds in the scope it stands in."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return [node.name] if node.name else []
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    return []


# The names assigned on every way to a point of the block; None for a point that no way leads to.


def runs(iterable: ast.expr) -> bool:
    """Whether a loop over an expression surely runs at least once."""
    if is_steps(iterable):
        return True
    if isinstance(iterable, (ast.List, ast.Tuple, ast.Set)):
        return any(not isinstance(element, ast.Starred) for element in iterable.elts)
    if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and iterable.func.id == "range":
        count = iterable.args[0] if len(iterable.args) == 1 else None
        return isinstance(count, ast.Constant) and isinstance(count.value, int) and count.value > 0
    return False


def swallows(context: ast.expr) -> bool:
    """Whether a context manager is one of those known to swallow exceptions."""
    function = context.func if isinstance(context, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in _SWALLOW


def deleted(statements: Iterable[ast.AST]) -> frozenset[str]:
    """Returns the names that statements may unbind.

    ``del`` unbinds, and so does the end of an ``except ... as name``.
    """
    names: set[str] = set()
    for node in walk_level(statements):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return frozenset(names)


def irrefutable(pattern: ast.pattern) -> bool:
    if isinstance(pattern, ast.MatchAs):
        return pattern.pattern is None or irrefutable(pattern.pattern)
    return isinstance(pattern, ast.MatchOr) and any(irrefutable(part) for part in pattern.patterns)
