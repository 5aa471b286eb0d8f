"""Finds what a block cannot hold, before the block is sent.

Each finding has its line and what to write instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from interpose.capture.source import Source
from interpose.capture.syntax import is_steps, walk_level

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def refuse_unsupported(source: Source, body: Sequence[ast.stmt], *, in_function: bool, in_class: bool) -> None:
    """Raises CaptureError for the first part of a block that only makes sense in its place.

    `in_function` and `in_class` say where the block stands: in a function's body, in a class or one of its methods.
    """
    for node in walk_level(body):
        problem = _problem(node, in_function)
        if problem is not None:
            raise source.error(problem[0], node, problem[1])
    leaving = _leaving(body, None)
    if leaving is not None:
        word = "break" if isinstance(leaving, ast.Break) else "continue"
        raise source.error(
            f"`{word}` would leave the block",
            leaving,
            "Decide before the block, or put the loop inside it. Over steps write `for step in tracer.iter[...]:`.",
        )
    if in_class:
        _refuse_class_names(source, body)


def _problem(node: ast.AST, in_function: bool) -> tuple[str, str] | None:
    if isinstance(node, ast.Return):
        return "`return` cannot leave a block that does not run here", "Assign the value to a name and return it after."
    if isinstance(node, (ast.Yield, ast.YieldFrom)):
        return "`yield` cannot leave a block that does not run here", "Save the values in a list and yield them after."
    if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)) or (
        isinstance(node, ast.comprehension) and node.is_async
    ):
        return (
            "a block cannot await: it does not run in this event loop",
            "Await before the block and use the result in it.",
        )
    if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
        return "`from ... import *` hides which names the block assigns", "Import the names that you use."
    if isinstance(node, (ast.Global, ast.Nonlocal)) and in_function:
        word = "global" if isinstance(node, ast.Global) else "nonlocal"
        return f"`{word}` stands inside the block", "Put the declaration at the top of the function, before the block."
    return None


def _leaving(statements: Iterable[ast.AST], inside: ast.AST | None) -> ast.Break | ast.Continue | None:
    """The first break or continue that belongs to a loop around the statements."""
    for node in statements:
        if isinstance(node, (ast.Break, ast.Continue)):
            return node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, _LOOPS):
            found = _leaving(_in_steps(node.body), node) or _leaving(node.orelse, inside)
        else:
            found = _leaving(ast.iter_child_nodes(node), inside)
        if found is not None:
            return found
    return None


def _in_steps(body: Sequence[ast.stmt]) -> list[ast.AST]:
    """Returns the bodies of ``with tracer.iter[...]`` in a loop.

    They become loops, so a break in them would change its meaning.
    """
    nodes = [part for statement in body for part in walk_level([statement])]
    return [
        inner
        for node in nodes
        if isinstance(node, ast.With) and any(is_steps(item.context_expr) for item in node.items)
        for inner in node.body
    ]


def _refuse_class_names(source: Source, body: Sequence[ast.stmt]) -> None:
    """Refuses ``super()`` and ``__private`` names of a class around the block.

    Their meaning comes from that class, which does not travel.
    """
    stack: list[ast.AST] = list(reversed(body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            raise source.error("`super()` needs the method around the block", node, "Call it before the block.")
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name.startswith("__") and not name.endswith("__"):
            raise source.error(
                f"`{name}` is private to the class around the block",
                node,
                "Assign it to another name before the block.",
            )
        if not isinstance(node, ast.ClassDef):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))
