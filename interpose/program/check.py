"""Checks the locations of a block in the notebook, before the trace is sent.

The check refuses a module that does not exist. It covers only certain cases: attributes and constant indices of a name that
holds a module or the tracer, and that the block does not assign. The worker finds the other cases.
"""

from __future__ import annotations

import ast
import difflib
import linecache
from collections.abc import Iterator, Mapping, Sequence

from interpose.capture import CaptureError
from interpose.contract.errors import InvalidArgument, UnknownLocation, did_you_mean
from interpose.contract.idioms import OF_TRACERS
from interpose.contract.names import not_assigned, read_only
from interpose.modules.envoy import Envoy
from interpose.modules.tree import PSEUDO, Node
from interpose.v1.trace_pb2 import Frame

# The blocks that were found right last, by the identities of their statements and modules; the values keep these alive.
_checked: dict[tuple[object, ...], tuple[object, ...]] = {}
_MOST_CHECKED = 256

TRACER_WORDS = ("invoke", "barrier", "cache", "result", "iter", "all", "stop", "log")
# Methods that the tracer has only in an outer block, and their error messages.
OUTER = {
    "invoke": "tracer.invoke(prompt) belongs in the outer block of `with model.trace() as tracer:`, not inside an invoke",
    "barrier": (
        "tracer.barrier(n) is made in the outer block of `with model.trace() as tracer:`, barrier = tracer.barrier(2), and "
        "called in each of n invokes: barrier()"
    ),
}


def check_locations(
    body: Sequence[ast.AST], filename: str, names: Mapping[str, object], tracers: frozenset[str]
) -> None:
    """Refuse the first wrong use of a module or the tracer, with the notebook's line.

    Args:
        body: statements with positions of the original file.
        filename: the name of that file.
        names: the values of the names that the block reads.
        tracers: names that are bound to the tracer.

    Raises:
        UnknownLocation: the module does not exist.
        InvalidArgument: the block applies, skips or uses a module in a way that is not possible, or the tracer has no such
            method in a block.
    """
    named = {name: obj._node for name, obj in names.items() if isinstance(obj, Envoy)}
    key = (tuple(map(id, body)), filename, tuple((name, id(node)) for name, node in named.items()), tracers)
    if key not in _checked:
        _check(body, filename, named, tracers)
        while len(_checked) >= _MOST_CHECKED:
            _checked.pop(next(iter(_checked)), None)  # another thread may have been first
        _checked[key] = (body, named)


def _check(body: Sequence[ast.AST], filename: str, named: Mapping[str, Node], tracers: frozenset[str]) -> None:
    bound = {name for statement in body for node in ast.walk(statement) for name in _binds(node)}
    roots = {name: node for name, node in named.items() if name not in bound}
    tracers = tracers - bound
    for node in _nodes(body):
        _check_applied(node, roots, filename)
        _check_skipped(node, roots, filename)
        _check_used(node, roots, filename)
        try:
            if isinstance(node, ast.Attribute | ast.Subscript):
                _resolve(node, roots)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in tracers:
                if node.attr in OUTER:
                    message = OUTER[node.attr]
                    raise InvalidArgument(message, location=f"tracer.{node.attr}", frames=[frame_at(node, filename)])
                _check_tracer(node.attr)
        except UnknownLocation as error:
            # The error shows the innermost expression that fails.
            inner = next((part for part in _chain(node) if part is not node and _fails(part, roots)), node)
            raise UnknownLocation(
                error.message,
                location=error.location,
                suggestions=error.suggestions,
                frames=[frame_at(inner, filename)],
            ) from None


def _check_applied(node: ast.AST, roots: Mapping[str, Node], filename: str) -> None:
    """Refuse `module(…)` for a module that the server cannot apply."""
    if not isinstance(node, ast.Call) or _fails(node.func, roots):
        return
    module = _resolve(node.func, roots)
    if module is not None and module.not_applied:
        raise InvalidArgument(module.not_applied, location=module.path, frames=[frame_at(node, filename)])


def refused(error: CaptureError) -> InvalidArgument:
    """Return the error for a block that cannot be captured."""
    frame = Frame(
        filename=error.filename, line=error.line, text=error.text or linecache.getline(error.filename, error.line)
    )
    message = f"{error.message}. {error.hint}" if error.hint else error.message
    return InvalidArgument(message, frames=[frame])


def _check_skipped(node: ast.AST, roots: Mapping[str, Node], filename: str) -> None:
    """Refuse `model.logits.skip(…)`: only a module can be skipped."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "skip"):
        return
    if _fails(node.func.value, roots):
        return
    named = _resolve(node.func.value, roots)
    if named is not None and named.path in PSEUDO:
        message = f"{named.path} is not a module that could be skipped; assign {named.path}.output = value"
        raise InvalidArgument(message, location=named.path, frames=[frame_at(node, filename)])


def _check_used(node: ast.AST, roots: Mapping[str, Node], filename: str) -> None:
    """Refuse an envoy as a value: saved, computed with, compared with numbers, or assigned."""
    named, message = None, ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "save":
        named = _module(node.args[0] if len(node.args) == 1 else node.func.value, roots)
        message = named.misused("saved", ".save()") if named is not None else ""
    elif isinstance(node, ast.BinOp | ast.UnaryOp) and not (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    ):
        operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        named = next(filter(None, (_module(operand, roots) for operand in operands)), None)
        message = named.misused("computed with") if named is not None else ""
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        attributes = [target for target in targets if isinstance(target, ast.Attribute | ast.Subscript)]
        named = next(filter(None, (_module(target, roots) for target in attributes)), None)
        message = not_assigned(named.path) if named is not None else ""
        for assigned in attributes:
            target = assigned.value if isinstance(assigned, ast.Subscript) else assigned
            owner = _module(target.value, roots) if isinstance(target, ast.Attribute) else None
            if owner is not None and isinstance(target, ast.Attribute) and target.attr in owner.weights:
                named, message = owner, read_only(owner.path, target.attr)
    if named is not None:
        raise InvalidArgument(message, location=named.path, frames=[frame_at(node, filename)])


def _module(node: ast.AST, roots: Mapping[str, Node]) -> Node | None:
    """Return the module of an expression, None if that is uncertain or there is no such module."""
    try:
        return _resolve(node, roots)
    except UnknownLocation:
        return None


def frame_at(node: ast.AST, filename: str) -> Frame:
    """Return the line of a node as a frame of a traceback."""
    line = getattr(node, "lineno", 1)
    text = linecache.getline(filename, line).rstrip("\n")
    frame = Frame(filename=filename, line=line, text=text)
    start, stop = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
    encoded = text.encode()  # columns of a syntax tree count bytes
    frame.end_line = getattr(node, "end_lineno", line) or line
    frame.column = len(encoded[:start].decode(errors="replace"))
    frame.end_column = len(encoded[:stop].decode(errors="replace")) if frame.end_line == line else len(text)
    return frame


def _nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Iterate over all nodes except the bodies of `try` with handlers.

    Such a body may test whether a module exists.
    """
    for node in body:
        yield node
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.Try) and node.handlers:
            children = iter([*node.handlers, *node.orelse, *node.finalbody])
        yield from _nodes(list(children))


def _binds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name] if node.name else []
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return []


def _resolve(node: ast.AST, roots: Mapping[str, Node]) -> Node | None:
    """Return the module of an expression, None if that is uncertain.

    Raises:
        UnknownLocation: there is no such module.
    """
    if isinstance(node, ast.Name):
        return roots.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _resolve(node.value, roots)
        if base is None or node.attr in base.words or node.attr in base.weights or node.attr.startswith("_"):
            return None
        return base.child(node.attr)
    if isinstance(node, ast.Subscript):
        base = _resolve(node.value, roots)
        index = _constant(node.slice)
        return None if base is None or index is None else base.child(index)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "next":
        return _resolve(node.func.value, roots)
    return None


def _constant(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if type(value) is int else None


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    """Iterate over the inner expressions of an attribute, index or call, innermost first."""
    inner = getattr(node, "value", None) or getattr(node, "func", None)
    if isinstance(inner, ast.AST):
        yield from _chain(inner)
    yield node


def _fails(node: ast.AST, roots: Mapping[str, Node]) -> bool:
    try:
        _resolve(node, roots)
    except UnknownLocation:
        return True
    return False


def _check_tracer(name: str) -> None:
    if name in TRACER_WORDS or name.startswith("_"):
        return
    near = [] if name in OF_TRACERS else difflib.get_close_matches(name, TRACER_WORDS, n=3)
    hint = (
        OF_TRACERS[name] if name in OF_TRACERS else did_you_mean(near) if near else f"it has {', '.join(TRACER_WORDS)}"
    )
    raise UnknownLocation(f"a tracer has no {name!r}; {hint}", location=f"tracer.{name}", suggestions=near)
