"""The objects that an outer block saves and all invokes of the trace share, and their names."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from interpose import capture
from interpose.contract.names import Name

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range)


class OuterSaves:
    """Gathers the objects that one run of an outer block saves."""

    def __init__(self) -> None:
        self._saved: list[object] = []

    def save(self, value: Any) -> Any:
        """Note that a value is saved, and return the value.

        Raises:
            InvalidArgument: the value is an envoy, which is only a name.
        """
        if isinstance(value, Name):
            value.save()
        if not any(value is saved for saved in self._saved):
            self._saved.append(value)
        return value

    def shared(self, block: capture.Block, scope: capture.Scope) -> dict[str, object]:
        """Return the names that hold saved values, after the block has run.

        A mutable object is recognised by its identity. Equal numbers or strings may be the same object, so such a value counts
        only where the save is assigned directly: `n = interpose.save(0)`.
        """
        assigned = _names_of_saves(block.body)
        found: dict[str, object] = {}
        for name in dict.fromkeys((*block.writes, *block.reads)):
            try:
                value = scope.lookup(name)
            except KeyError:
                continue
            plain = isinstance(value, _IMMUTABLE)
            if (plain and name in assigned) or (not plain and any(value is saved for saved in self._saved)):
                found[name] = value
        named = list(found.values())
        for saved in self._saved:  # no name holds the object; it may be inside another object
            if not isinstance(saved, _IMMUTABLE) and not any(saved is value for value in named):
                found[f"__interpose_shared_{len(found)}__"] = saved
        return found


def _names_of_saves(body: Sequence[ast.AST]) -> set[str]:
    """Return the names that are assigned directly from `….save()` or `save(…)`."""
    names: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if isinstance(value, ast.Call) and "save" in (getattr(value.func, "attr", ""), getattr(value.func, "id", "")):
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names
