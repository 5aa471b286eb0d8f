"""Finds the names that a block may read before it assigns them, and the names it may assign.

It is a definite-assignment walk. What a block reads must travel with it, and what it assigns may come back. "May read" errs
to the safe side: a name is left out only where every way through the block assigns it first. Two constructs are taken to run
to their end at least once although Python does not promise it, because the opposite would ship values from an earlier run of
the same cell: a ``with`` whose context manager is not known to swallow exceptions, and a loop over a tracer's steps.

Annotations are not read: blocks are compiled with annotations as text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from interpose.capture.syntax import (
    Comprehension,
    Function,
    binds,
    bound_names,
    deleted,
    irrefutable,
    runs,
    swallows,
)


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
        for name in binds(node):
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
        at_least_once = runs(node.iter)
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
        swallowed = False
        for item in node.items:
            before = self.expressions([item.context_expr, item.optional_vars], before)
            swallowed = swallowed or swallows(item.context_expr)
        after = self.block(node.body, before)
        # A body that never comes to its end may be an invoke's, which does not run here, or the exception may be swallowed.
        return _meet(after, before - deleted(node.body)) if swallowed or after is None else after

    _asyncwith = _with

    def _try(self, node: ast.Try, before: frozenset[str]) -> _Names:
        # An exception may come anywhere: a handler can count on nothing that the body assigned, nor on what it deleted.
        interrupted = before - deleted(node.body)
        ways = [self.block(node.orelse, self.block(node.body, before))]
        for handler in node.handlers:
            inside = self.expression(handler.type, interrupted)
            after = self.block(handler.body, self._write(handler.name, inside) if handler.name else inside)
            ways.append(after - {handler.name} if after is not None and handler.name else after)
        after = _meet(*ways)
        if not node.finalbody:
            return after
        final = self.block(node.finalbody, before - deleted([*node.body, *node.orelse, *node.handlers]))
        return None if after is None or final is None else (after - deleted(node.finalbody)) | final

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
                for name in binds(part) if isinstance(part, ast.pattern) else ():
                    inside = self._write(name, inside)
            inside = self.expression(case.guard, inside)
            ways.append(self.block(case.body, inside))
            exhaustive = exhaustive or (case.guard is None and irrefutable(case.pattern))
        return _meet(*ways) if exhaustive else _meet(before, *ways)
