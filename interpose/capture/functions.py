"""Finds the source of a function that a block uses, so that a worker can make it again."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeGuard

from interpose.capture.analysis import free_names, outer_writes
from interpose.capture.block import block_text
from interpose.capture.recent import Recent
from interpose.capture.remake import computed_defaults, default_name
from interpose.capture.source import Source, load
from interpose.capture.syntax import Function
from interpose.capture.verify import same_function


@dataclass(frozen=True)
class FunctionSource:
    """A function as text, with the names it takes from around it.

    `remake.compile_function` takes it.

    `reads` are the names its body may look up outside of itself, and one name for each default value that is not a
    constant. `bindings` has the values of those that are bound, from the closure, the module, and the defaults. `stores`
    are the names outside of itself that it assigns (``global``, ``nonlocal``), `variables` says which variable a name is:
    the same object for the same variable. `body` is the syntax of what it does, to be looked at only.
    """

    source: str
    filename: str
    first_line: int
    indent: int
    name: str
    reads: tuple[str, ...]
    bindings: dict[str, object] = field(repr=False)
    stores: tuple[str, ...] = ()
    variables: dict[str, object] = field(default_factory=dict, repr=False)
    body: ast.AST = field(default_factory=ast.Pass, repr=False)


@dataclass(frozen=True)
class _Text:
    source: str
    filename: str
    first_line: int
    indent: int
    reads: tuple[str, ...]
    stores: tuple[str, ...]
    defaults: tuple[str, ...]  # the parameters whose default is not a constant
    node: ast.AST


_texts: Recent[_Text] = Recent(1024)


def function_source(fn: object) -> FunctionSource | None:
    """Returns the source of a function made by ``def`` or lambda, or None without source.

    Decorators are left out: `fn` is what they returned.
    """
    if not isinstance(fn, types.FunctionType):
        return None
    code = fn.__code__
    text = _texts.get(code)
    if text is None:
        text = _find(fn)
        if text is None:
            return None
        _texts.put(code, text)
    bindings: dict[str, object] = {}
    for name in text.reads:
        if name in fn.__globals__:
            bindings[name] = fn.__globals__[name]
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            bindings[name] = cell.cell_contents
        except ValueError:
            bindings.pop(name, None)
    values = defaults_of(fn)
    bindings.update({default_name(name): values[name] for name in text.defaults if name in values})
    reads = (*text.reads, *(default_name(name) for name in text.defaults))
    bindings = {name: value for name, value in bindings.items() if name in reads}
    variables = variables_of([fn], (*text.reads, *text.stores))
    return FunctionSource(
        text.source, text.filename, text.first_line, text.indent, fn.__name__, reads, bindings, text.stores, variables,
        text.node,
    )  # fmt: skip


def variables_of(functions: Iterable[types.FunctionType], names: Iterable[str]) -> dict[str, object]:
    """Tells which variable each name is in functions defined in one place.

    A variable is a closure's cell, or a name of a module.
    """
    found: dict[str, object] = {}
    for function in functions:
        found.update({name: module_variable(function.__globals__, name) for name in names if name not in found})
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found.update({name: id(cell) for name, cell in cells if name in names})
    return found


def module_variable(module: dict[str, object], name: str) -> object:
    """Which variable a name of a module is."""
    return id(module), name


def defaults_of(fn: types.FunctionType) -> dict[str, object]:
    """The default values of a function's parameters."""
    parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
    return {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}


def _find(fn: types.FunctionType) -> _Text | None:
    code = fn.__code__
    try:
        source = load(code.co_filename, fn.__globals__, code)
    except SyntaxError:
        return None
    if source is None:
        return None
    found = [node for node in ast.walk(source.tree) if _is_candidate(node, code) and same_function(code, node)]
    if len(found) > 1:
        found = [node for node in found if same_function(code, node, exactly=True)]
    if not found or any(ast.dump(node) != ast.dump(found[0]) for node in found[1:]):
        return None
    node = found[0]
    text, first_line, indent = _cut_lambda(source, node) if isinstance(node, ast.Lambda) else _cut_def(source, node)
    defaults = tuple(argument.arg for argument, _ in computed_defaults(node.args))
    return _Text(text, source.filename, first_line, indent, free_names(node), outer_writes(node), defaults, node)


def _is_candidate(node: ast.AST, code: types.CodeType) -> TypeGuard[Function]:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != code.co_name:
        return False
    return min([node.lineno, *(item.lineno for item in node.decorator_list)]) == code.co_firstlineno


def _cut_def(source: Source, node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, int, int]:
    bare = ast.copy_location(type(node)(**{**dict(ast.iter_fields(node)), "decorator_list": []}), node)
    return block_text(source.lines, [bare])


def _cut_lambda(source: Source, node: ast.Lambda) -> tuple[str, int, int]:
    end = node.end_lineno or node.lineno
    lines = [line.encode() for line in source.lines[node.lineno - 1 : end]]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return b"".join(lines).decode(), node.lineno, node.col_offset
