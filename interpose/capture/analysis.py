"""Finds the names that a block may read before it assigns them, and the names it may assign.

It is a definite-assignment walk. What a block reads must travel with it, and what it assigns may come back. "May read" errs
to the safe side: a name is left out only where every way through the block assigns it first. Two constructs are taken to run
to their end at least once although Python does not promise it, because the opposite would ship values from an earlier run of
the same cell: a ``with`` whose context manager is not known to swallow exceptions, and a loop over a tracer's steps.

Annotations are not read: blocks are compiled with annotations as text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_SWALLOW = frozenset({"suppress", "raises", "assertRaises", "assertRaisesRegex"})


def block_reads_writes(body: Sequence[ast.stmt]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names `body` may read before assigning them, and the names it may assign.

    Both lists are in order of appearance.
    """
    walk = _Walk()
    walk.block(body, frozenset())
    return tuple(walk.reads), tuple(walk.writes)


def free_names(node: ast.AST) -> tuple[str, ...]:
    """Returns the names that a function, lambda or expression takes from outside, in order."""
    walk = _Walk()
    if isinstance(node, Function):
        walk.scope(node, frozenset())
    else:
        walk.expression(node, frozenset())
    return tuple(walk.reads)


def outer_writes(node: ast.AST) -> tuple[str, ...]:
    """Returns the names outside of itself that a function assigns.

    The function declares them ``global`` or ``nonlocal``.
    """
    walk = _Walk()
    if isinstance(node, Function):
        walk.scope(node, frozenset())
    return tuple(walk.writes)


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
        names.update(_binds(node))
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


def _binds(node: ast.AST) -> list[str]:
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
_Names = frozenset[str] | None


def _meet(*ways: _Names) -> _Names:
    """What is assigned where several ways come together."""
    reached = [way for way in ways if way is not None]
    return frozenset.intersection(*reached) if reached else None


class _Walk:
    """One walk over the statements of one scope. `reads` and `writes` are dicts for their order.

    The methods take the names assigned before a node and return those assigned after it. `around` is given for a class
    body: the names assigned where the class stands, which is all that functions and comprehensions in it can see.
    """

    def __init__(self, around: frozenset[str] | None = None) -> None:
        self.reads: dict[str, None] = {}
        self.writes: dict[str, None] = {}
        self._around = around
        self._breaks: list[list[_Names]] = []  # for each loop around, what is assigned at its breaks
        self._continues: list[list[_Names]] = []

    # Names and expressions

    def _read(self, name: str, before: frozenset[str]) -> None:
        if name not in before:
            self.reads.setdefault(name)

    def _write(self, name: str, before: frozenset[str]) -> frozenset[str]:
        self.writes.setdefault(name)
        return before | {name}

    def expressions(self, nodes: Iterable[ast.AST | None], before: frozenset[str]) -> frozenset[str]:
        for node in nodes:
            before = self.expression(node, before)
        return before

    def expression(self, node: ast.AST | None, before: frozenset[str]) -> frozenset[str]:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                return self._write(node.id, before)
            self._read(node.id, before)
            return before if isinstance(node.ctx, ast.Load) else before - {node.id}
        if isinstance(node, ast.NamedExpr):
            return self.expression(node.target, self.expression(node.value, before))
        if isinstance(node, ast.Lambda):
            before = self.expressions([*node.args.defaults, *node.args.kw_defaults], before)
            self.scope(node, before)
            return before
        if isinstance(node, Comprehension):
            return self._comprehension(node, before)
        if isinstance(node, ast.BoolOp):
            before = self.expression(node.values[0], before)
            self.expressions(node.values[1:], before)
            return before
        if isinstance(node, ast.Compare):
            before = self.expressions([node.left, node.comparators[0]], before)
            self.expressions(node.comparators[1:], before)
            return before
        if isinstance(node, ast.IfExp):
            before = self.expression(node.test, before)
            return self.expression(node.body, before) & self.expression(node.orelse, before)
        return before if node is None else self.expressions(ast.iter_child_nodes(node), before)

    def _comprehension(self, node: Comprehension, before: frozenset[str]) -> frozenset[str]:
        before = self.expression(node.generators[0].iter, before)
        names = [part for generator in node.generators for part in ast.walk(generator.target)]
        bound = {part.id for part in names if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        inside = (before if self._around is None else self._around) | bound
        inside = self.expressions([part for part in names if isinstance(getattr(part, "ctx", None), ast.Load)], inside)
        for index, generator in enumerate(node.generators):
            inside = self.expressions([generator.iter if index else None, *generator.ifs], inside)
        self.expressions([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inside)
        return before

    def scope(self, node: Function | ast.ClassDef, before: frozenset[str]) -> None:
        """Notes the names that a nested function or class takes from around it.

        Names that it assigns and that are not its own are noted as assignments.
        """
        own = bound_names(node)
        visible = before if self._around is None else self._around
        if isinstance(node, ast.ClassDef):
            # Not even a class sees the names of the class around it.
            inner = _Walk(around=visible)
            inner.block(node.body, visible)
        else:
            inner = _Walk()
            if isinstance(node.body, list):
                inner.block(node.body, frozenset())
            else:
                inner.expression(node.body, frozenset())
            for name in own:
                inner.reads.pop(name, None)
        for name in inner.reads:
            self._read(name, visible)
        for name in inner.writes:
            if name not in own:
                self.writes.setdefault(name)

    # Statements

    def block(self, statements: Iterable[ast.stmt], before: _Names) -> _Names:
        for statement in statements:
            if before is None:
                break
            visit = getattr(self, f"_{type(statement).__name__.lower()}", self.expression)
            before = visit(statement, before)
        return before

    def _assign(self, node: ast.Assign, before: frozenset[str]) -> _Names:
        return self.expressions([node.value, *node.targets], before)

    def _annassign(self, node: ast.AnnAssign, before: frozenset[str]) -> _Names:
        if node.value is None and isinstance(node.target, ast.Name):
            return before
        return self.expressions([node.value, node.target], before)

    def _augassign(self, node: ast.AugAssign, before: frozenset[str]) -> _Names:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id, before)
        return self.expressions([node.value, node.target], before)

    def _import(self, node: ast.Import | ast.ImportFrom, before: frozenset[str]) -> _Names:
        for name in _binds(node):
            before = self._write(name, before)
        return before

    _importfrom = _import

    def _functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, before: frozenset[str]) -> _Names:
        before = self.expressions([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults], before)
        # The function cannot run before its own name is bound.
        self.writes.setdefault(node.name)
        self.scope(node, before | {node.name})
        return before | {node.name}

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, before: frozenset[str]) -> _Names:
        before = self.expressions([*node.decorator_list, *node.bases, *node.keywords], before)
        self.scope(node, before)
        return self._write(node.name, before)

    def _global(self, node: ast.Global | ast.Nonlocal, before: frozenset[str]) -> _Names:
        return before

    _nonlocal = _global

    def _return(self, node: ast.Return | ast.Raise, before: frozenset[str]) -> _Names:
        self.expressions(ast.iter_child_nodes(node), before)
        return None

    _raise = _return

    def _break(self, node: ast.Break, before: frozenset[str]) -> _Names:
        if self._breaks:
            self._breaks[-1].append(before)
        return None

    def _continue(self, node: ast.Continue, before: frozenset[str]) -> _Names:
        if self._continues:
            self._continues[-1].append(before)
        return None

    def _if(self, node: ast.If, before: frozenset[str]) -> _Names:
        before = self.expression(node.test, before)
        return _meet(self.block(node.body, before), self.block(node.orelse, before))

    def _for(self, node: ast.For | ast.AsyncFor, before: frozenset[str]) -> _Names:
        before = self.expression(node.iter, before)
        at_least_once = _runs(node.iter)
        once, breaks = self._loop([node.target], node.body, before)
        if at_least_once and once is not None:
            end = self.block(node.orelse, once)
        else:
            end = self.block(node.orelse, _meet(before, once))
        return _meet(end, *breaks)

    _asyncfor = _for

    def _while(self, node: ast.While, before: frozenset[str]) -> _Names:
        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        tested = self.expression(node.test, before)
        once, breaks = self._loop([node.test], node.body, before)
        return _meet(None if forever else self.block(node.orelse, _meet(tested, once)), *breaks)

    def _loop(
        self, head: Sequence[ast.expr], body: Sequence[ast.stmt], before: frozenset[str]
    ) -> tuple[_Names, list[_Names]]:
        """Returns what is assigned when the body has run, and at each break.

        The first turn starts with the fewest names assigned, but for those that a turn deletes: then another is walked.
        """
        while True:
            self._breaks.append([])
            self._continues.append([])
            end = self.block(body, self.expressions(head, before))
            end = _meet(end, *self._continues.pop())
            breaks = self._breaks.pop()
            if end is None or before <= end:
                return end, breaks
            before = before & end

    def _with(self, node: ast.With | ast.AsyncWith, before: frozenset[str]) -> _Names:
        swallows = False
        for item in node.items:
            before = self.expressions([item.context_expr, item.optional_vars], before)
            swallows = swallows or _swallows(item.context_expr)
        after = self.block(node.body, before)
        # A body that never comes to its end may be an invoke's, which does not run here, or the exception may be swallowed.
        return _meet(after, before - _deleted(node.body)) if swallows or after is None else after

    _asyncwith = _with

    def _try(self, node: ast.Try, before: frozenset[str]) -> _Names:
        # An exception may come anywhere: a handler can count on nothing that the body assigned, nor on what it deleted.
        interrupted = before - _deleted(node.body)
        ways = [self.block(node.orelse, self.block(node.body, before))]
        for handler in node.handlers:
            inside = self.expression(handler.type, interrupted)
            after = self.block(handler.body, self._write(handler.name, inside) if handler.name else inside)
            ways.append(after - {handler.name} if after is not None and handler.name else after)
        after = _meet(*ways)
        if not node.finalbody:
            return after
        final = self.block(node.finalbody, before - _deleted([*node.body, *node.orelse, *node.handlers]))
        return None if after is None or final is None else (after - _deleted(node.finalbody)) | final

    _trystar = _try

    def _match(self, node: ast.Match, before: frozenset[str]) -> _Names:
        before = self.expression(node.subject, before)
        ways: list[_Names] = []
        exhaustive = False
        for case in node.cases:
            inside = before
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.expr):
                    inside = self.expression(part, inside) if isinstance(part, ast.Name) else inside
                for name in _binds(part) if isinstance(part, ast.pattern) else ():
                    inside = self._write(name, inside)
            inside = self.expression(case.guard, inside)
            ways.append(self.block(case.body, inside))
            exhaustive = exhaustive or (case.guard is None and _irrefutable(case.pattern))
        return _meet(*ways) if exhaustive else _meet(before, *ways)


def _runs(iterable: ast.expr) -> bool:
    """Whether a loop over an expression surely runs at least once."""
    if is_steps(iterable):
        return True
    if isinstance(iterable, (ast.List, ast.Tuple, ast.Set)):
        return any(not isinstance(element, ast.Starred) for element in iterable.elts)
    if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and iterable.func.id == "range":
        count = iterable.args[0] if len(iterable.args) == 1 else None
        return isinstance(count, ast.Constant) and isinstance(count.value, int) and count.value > 0
    return False


def _swallows(context: ast.expr) -> bool:
    """Whether a context manager is one of those known to swallow exceptions."""
    function = context.func if isinstance(context, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in _SWALLOW


def _deleted(statements: Iterable[ast.AST]) -> frozenset[str]:
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


def _irrefutable(pattern: ast.pattern) -> bool:
    if isinstance(pattern, ast.MatchAs):
        return pattern.pattern is None or _irrefutable(pattern.pattern)
    return isinstance(pattern, ast.MatchOr) and any(_irrefutable(part) for part in pattern.patterns)
