"""One tree of a model over several pipeline stages: each stage describes its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_pp_group
from vllm.model_executor.models.utils import PPMissingLayer

from executor.model.describe import describe_module
from executor.model.layouts import Layouts
from executor.model.node import Node
from executor.model.remote_module import RemoteModule
from executor.model.skips import holds_attention
from executor.model.tree import ModuleTree
from interpose.v1 import model_pb2 as pb


@dataclass(frozen=True)
class Had:
    """A module of one stage, as the stage describes it to the others.

    Attributes:
        described: the module's description, serialized.
        attention: whether the module holds attention.
        missing: whether another stage has the module.
    """

    described: bytes
    attention: bool
    missing: bool


def join(tree: ModuleTree, events: list[tuple[str, str]]) -> None:
    """Extend a stage's tree to the tree of the whole model; every rank calls this.

    Args:
        tree: the tree of this stage.
        events: the order in which this stage runs its modules.
    """
    mine = {path: _had(node) for path, node in tree.nodes.items()}
    ran = [event for event in events if not mine[event[0]].missing]
    stages = gather((mine, ran))
    parts: list[dict[str, Had]] = [had for had, _ in stages]
    nodes = {path: _node(tree, path, parts) for path in _paths(parts)}
    tree.join(nodes, [order for _, order in stages], get_pp_group().rank_in_group)


def gather(mine: Any) -> list[Any]:
    """Send a value to the other stages; return the value of each stage, this stage included."""
    group = get_pp_group()
    stages: list[Any] = [mine] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(stages, mine, group=group.cpu_group)
    return stages


def _had(node: Node) -> Had:
    module = node.module
    assert module is not None
    return Had(describe_module(node).SerializeToString(), holds_attention(module), isinstance(module, PPMissingLayer))


def _paths(stages: list[dict[str, Had]]) -> list[str]:
    """Return the paths of the whole model's modules, in the model's order.

    A module that a stage lacks takes the place of the gap in that stage.
    """
    present = [[path for path, had in stage.items() if not had.missing] for stage in stages]
    found: dict[str, None] = {}
    for path, had in stages[0].items():
        if not had.missing:
            found[path] = None
            continue
        for paths in present:
            found.update(dict.fromkeys(other for other in paths if f"{other}.".startswith(f"{path}.")))
    for paths in present[1:]:
        found.update(dict.fromkeys(paths))
    return list(found)


def _node(tree: ModuleTree, path: str, stages: list[dict[str, Had]]) -> Node:
    """Return the node of a module: this stage's own node, or a node for another stage's module."""
    first = next(i for i, stage in enumerate(stages) if path in stage and not stage[path].missing)
    node = tree.nodes.get(path)
    if node is None or isinstance(node.module, PPMissingLayer):
        had = stages[first][path]
        module = RemoteModule(pb.Module.FromString(had.described), had.attention)
        node = Node(path, module, Layouts(path, torch.nn.Identity(), 1))
    node.stage = first
    return node
