"""What a block does besides its only loop over steps, if it only makes lists and saves them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping

from executor.core.programs import Unit
from executor.plan.eligible import MOST_TEXT
from interpose.capture.analysis import block_reads_writes
from interpose.capture.rewrite import SAVE, parse_block, rewrite
from interpose.capture.syntax import is_steps

# An import of these changes nothing: the worker has imported them.
_LIBRARIES = frozenset({"torch", "math", "numpy"})


@functools.lru_cache(256)
def lists_of(unit: Unit) -> Mapping[str, bool] | None:
    """Return the lists that a block makes empty before its loop, and whether each is saved.

    None if the block does more besides its loop, in any order. It may bind names to numbers and text before the loop, and import
    the libraries that every worker has.

    Args:
        unit: the block's text.
    """
    if len(unit.source) > MOST_TEXT:
        return None
    tracers = frozenset(unit.tracers)
    try:
        tree = rewrite(parse_block(unit.source, unit.filename, unit.first_line, unit.indent), tracers)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    loops = [i for i, node in enumerate(tree.body) if isinstance(node, ast.For) and is_steps(node.iter, tracers)]
    if len(loops) != 1:
        return None
    [at], lists = loops, dict[str, bool]()
    if not all(_is_plain(node, lists) for node in tree.body[:at]):
        return None
    if not all(_is_save(node, lists) or _is_nothing(node) for node in tree.body[at + 1 :]):
        return None
    loop = tree.body[at]
    assert isinstance(loop, ast.For)
    _, writes = block_reads_writes([loop])
    return None if loop.orelse or lists.keys() & set(writes) else lists


def _is_plain(node: ast.stmt, lists: dict[str, bool]) -> bool:
    """Return whether a statement before the loop may be there; note its list."""
    if _is_save(node, lists) or _is_nothing(node):
        return True
    if isinstance(node, ast.Import):
        return all(one.name.partition(".")[0] in _LIBRARIES for one in node.names)
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").partition(".")[0] in _LIBRARIES
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
        return False
    name, value, saved = node.targets[0].id, node.value, False
    if name in lists:
        return False
    inner = _saved(value)
    if inner is not None:
        value, saved = inner, True
    if (isinstance(value, ast.List) and not value.elts) or (isinstance(value, ast.Call) and _is_list_call(value)):
        lists[name] = saved
        return True
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        value = value.operand
    return not saved and isinstance(value, ast.Constant)


def _is_list_call(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "list" and not (node.args or node.keywords)


def _saved(node: ast.expr) -> ast.expr | None:
    """Return what an expression saves, None if it saves nothing."""
    saves = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == SAVE
    return node.args[0] if isinstance(node, ast.Call) and saves else None


def _is_save(node: ast.stmt, lists: dict[str, bool]) -> bool:
    """Return whether a statement saves one of the lists; note it."""
    saved = _saved(node.value) if isinstance(node, ast.Expr) else None
    if not isinstance(saved, ast.Name) or saved.id not in lists:
        return False
    lists[saved.id] = True
    return True


def _is_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
