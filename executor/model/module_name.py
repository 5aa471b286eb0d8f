"""The name of a module in a block: the name's own data, apart from its use in the block."""

from __future__ import annotations

from typing import NoReturn

from executor.core.errors import Refusal
from executor.model.node import Node
from executor.model.remote_module import RemoteModule
from executor.model.tree import ModuleTree
from interpose.contract.names import Name, not_a_value
from interpose.v1 import trace_pb2 as pb


class ModuleName(Name):
    """A name of a module of the served model.

    Args:
        tree: the model's modules.
        node: the module.
        given: whether the name came with the block, and not from another name.
    """

    __slots__ = ("_given", "_node", "_tree")
    _given: bool
    _node: Node
    _tree: ModuleTree

    def __init__(self, tree: ModuleTree, node: Node, given: bool = False) -> None:
        object.__setattr__(self, "_tree", tree)
        object.__setattr__(self, "_node", node)
        object.__setattr__(self, "_given", given)

    def _misused(self, used: str, then: str = "") -> NoReturn:
        raise self.misuse(used, then)

    def misuse(self, used: str, then: str = "") -> Refusal:
        """Return the error for a use of the name as a value."""
        node = self._node
        numbered = any(name.isdigit() for name in node.children)
        message = not_a_value(node.path, used, tuple(node.views), numbered, then)
        return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=node.path)

    @property
    def may_be_kept(self) -> bool:
        """Return whether a saved value may hold the name: if the notebook put it there."""
        return self._given and self._node.module is not None

    @property
    def path(self) -> str:
        """The module's path; "" for the model itself."""
        return self._node.path

    def __repr__(self) -> str:
        module = self._node.layer
        kind = type(module).__name__ if module is not None else self._node.title or "location"
        if isinstance(module, RemoteModule):
            kind = module.described.class_name
        return f"<{self._node.path or 'model'}: {kind}>"

    def _same(self, other: object) -> bool:
        return isinstance(other, ModuleName) and other._node is self._node

    def __hash__(self) -> int:
        return hash(self._node.path)
