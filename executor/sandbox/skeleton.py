"""The model's modules without the model: what a sandboxed block knows of it.

A block names modules, and asks in which order they run. Their weights and their code stay in the worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from executor.model.describe import describe_module
from executor.model.node import Node
from executor.model.remote_module import RemoteModule
from executor.model.skips import holds_attention
from executor.model.tree import PSEUDO, ModuleTree
from executor.views.experts import Chosen, ChosenThere
from executor.views.joining import Told, tell, told
from interpose.v1 import model_pb2 as pb


@dataclass(frozen=True)
class Skeleton:
    """A tree of modules as data.

    Attributes:
        modules: the serialized description of each module by path, and whether it holds attention.
        order: as of `ModuleTree.order_facts`.
        canonical: the canonical nodes beside the modules, by name.
        applies: what a call of a canonical node applies: the path of another node, by the node's path.
    """

    modules: dict[str, tuple[bytes, bool]]
    order: dict[str, Any]
    canonical: dict[str, Told]
    applies: dict[str, str]

    @classmethod
    def of(cls, tree: ModuleTree) -> Skeleton:
        """Return the skeleton of a worker's tree."""
        modules = {}
        for path, node in tree.nodes.items():
            assert node.module is not None
            modules[path] = describe_module(node).SerializeToString(), holds_attention(node.module)
        nodes = {name: node for name, node in tree.pseudo.items() if name not in PSEUDO}
        below = [one for node in nodes.values() for one in _descendants(node)]
        applies = {one.path: one.applies.path for one in below if one.applies is not None}
        return cls(modules, tree.order_facts(), {name: _told(node) for name, node in nodes.items()}, applies)

    def tree(self) -> ModuleTree:
        """Return a tree that knows what the worker's tree knows, without a module that could run."""
        found: dict[str, RemoteModule] = {}
        for path, (described, attention) in self.modules.items():
            found[path] = RemoteModule(pb.Module.FromString(described), attention)
            if path:
                parent, _, name = path.rpartition(".")
                found[parent].add_module(name, found[path])
        tree = ModuleTree(found[""], 1)
        tree.take_order(self.order)
        for name, data in self.canonical.items():
            tree.pseudo[name] = told(tree, data)
        for path, other in self.applies.items():
            node, applied = tree.find(path), tree.find(other)
            assert node is not None
            node.applies = applied
        return tree


def _descendants(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children.values():
        yield from _descendants(child)


def _told(node: Node) -> Told:
    """Return a canonical node as data.

    The router of the worker's model is asked which experts it chooses.
    """
    views = {
        name: ChosenThere(view.name, view.owner, view.node, view.kind, view.shape, view.item)
        if isinstance(view, Chosen)
        else view
        for name, view in node.views.items()
    }
    path, title, views_told, _ = tell(Node(node.path, None, node.layouts, views=views, title=node.title))
    return path, title, views_told, [_told(child) for child in node.children.values()]
