"""Finds names that a block assigned and did not save, and that the notebook reads."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType
from typing import Any

from interpose import capture
from interpose.modules.envoy import Envoy

_BY_NAME = frozenset({"locals", "globals", "vars", "eval", "exec", "dir"})  # functions that may read any name


def unsaved(
    block: capture.Block, scope: capture.Scope, delivered: Collection[str], others: Iterable[capture.Block]
) -> dict[str, int]:
    """Return the names whose values are lost without a use, with the lines of their assignments.

    A name counts if the block assigns a value of the model to it and never reads it; if no block of the trace saved it or reads
    it; if the notebook has no such name; and if the notebook reads it after the block, or is typed cell by cell.

    Args:
        block, scope: the block and the names around it.
        delivered: the names that the trace saved.
        others: the other blocks of the trace.
    """
    lost = [
        name for name in block.writes if not name.startswith("_") and name not in delivered and not _has(scope, name)
    ]
    if not lost or any(name in other.reads for other in others for name in lost):
        return {}
    nodes = [node for statement in block.body for node in ast.walk(statement)]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
    if read & _BY_NAME:
        return {}
    stores: dict[str, list[ast.Name]] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stores.setdefault(node.id, []).append(node)
    values = {name: list(_assigned(nodes, name)) for name in lost}
    found = {}
    for name in lost:
        if name in read or len(values[name]) != len(stores.get(name, ())) or not values[name]:
            continue
        if all(_of_model(value, scope) for value in values[name]) and _is_read_later(block, scope, name):
            found[name] = stores[name][0].lineno
    return found


def _assigned(nodes: Iterable[ast.AST], name: str) -> Iterator[ast.expr]:
    """Yield the values of plain assignments `name = value`."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == name:
                yield node.value


def _of_model(value: ast.expr, scope: capture.Scope) -> bool:
    """Whether an expression reads the model and saves nothing."""
    nodes = list(ast.walk(value))
    if any("save" in (getattr(node, "attr", ""), getattr(node, "id", "")) for node in nodes):
        return False
    return any(isinstance(node, ast.Name) and isinstance(_lookup(scope, node.id), Envoy) for node in nodes)


def _is_read_later(block: capture.Block, scope: capture.Scope, name: str) -> bool:
    """Whether the notebook reads a name after the block, or further cells may come."""
    last = max(statement.end_lineno or statement.lineno for statement in block.body)
    used = _first_use(scope.frame.f_code, name, last)
    if used:
        return used.startswith("LOAD")
    shell: Any = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and scope.globals is running.user_ns and scope.frame.f_locals is scope.globals


def _first_use(code: CodeType, name: str, after: int) -> str:
    """Return the name of the first instruction that uses a name below a line; "" if none does."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        position = instruction.positions.lineno if sys.version_info >= (3, 11) and instruction.positions else None
        line = position or (instruction.starts_line if type(instruction.starts_line) is int else None) or line
        argument = instruction.argval
        if line > after and name in (argument if isinstance(argument, tuple) else (argument,)):
            return instruction.opname
    return ""


def _has(scope: capture.Scope, name: str) -> bool:
    try:
        scope.lookup(name)
    except KeyError:
        return False
    return True


def _lookup(scope: capture.Scope, name: str) -> object:
    try:
        return scope.lookup(name)
    except KeyError:
        return None
