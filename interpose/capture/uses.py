"""Finds which attributes of a module code uses, as far as the text shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterable


def attributes_used(nodes: Iterable[ast.AST], name: str) -> tuple[set[tuple[str, ...]], ast.AST | None]:
    """Returns the chains of attributes that code reads of a name.

    If the code uses the name in another way, a node of that use is returned too.

    ``lib.sub.f(x)`` reads the chain ``("sub", "f")``. Other ways are the name alone, as in ``g(lib)``, and assigning to
    its attributes.
    """
    chains: set[tuple[str, ...]] = set()
    stack: list[tuple[ast.AST, tuple[str, ...]]] = [(node, ()) for node in nodes]
    while stack:
        node, after = stack.pop()
        if isinstance(node, ast.Attribute):
            if not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and node.value.id == name:
                return chains, node
            stack.append((node.value, (node.attr, *after)))
            continue
        if isinstance(node, ast.Name) and node.id == name:
            if not after:
                return chains, node
            chains.add(after)
        stack.extend((child, ()) for child in ast.iter_child_nodes(node))
    return chains, None
