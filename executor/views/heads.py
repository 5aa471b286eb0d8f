"""Finds the parts of a layer's attention: merged projection, kernel, output projection.

The parts are recognised by the engine's classes and sizes, and by what a recorded forward passed between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

from executor.model.layouts import Unknown
from executor.model.node import Node
from executor.model.tree import ModuleTree
from executor.views.probe import ProbeRun, same


@dataclass(frozen=True)
class Heads:
    """A layer's attention.

    Attributes:
        path: the path of the module that holds all of the attention.
        kernel: the engine's attention kernel.
        projection: the merged q/k/v projection; None if the architecture has none that feeds the kernel.
        out: the projection of the heads' outputs; None if there is none.
        why: what a refusal says about values that need a missing part.
    """

    path: str
    kernel: Node
    projection: Node | None
    out: Node | None
    why: str

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of query heads and of key/value heads of the whole model."""
        module = self.projection.layer if self.projection is not None else None
        assert isinstance(module, QKVParallelLinear)
        return module.total_num_heads, module.total_num_kv_heads

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of a query or key head, and of a value head."""
        kernel = self.kernel.layer
        assert isinstance(kernel, Attention)
        return kernel.head_size, kernel.head_size_v


def find_heads(tree: ModuleTree, probe: ProbeRun, kernel: Node, layer: str) -> Heads:
    """Return the attention around a kernel inside a layer."""
    path = kernel.path
    while path != layer:
        path = path.rpartition(".")[0]
        below = [node for name, node in tree.nodes.items() if name.startswith(path + ".")]
        if any(isinstance(node.layer, RowParallelLinear | QKVParallelLinear) for node in below):
            break
    projection = _projection(tree, probe, kernel, path)
    out = _out(tree, probe, kernel, path)
    return Heads(
        path, kernel, projection, out, "the engine has no merged projection here that feeds its attention kernel"
    )


def _projection(tree: ModuleTree, probe: ProbeRun, kernel: Node, path: str) -> Node | None:
    begun, module = probe.at(kernel.path, "input"), kernel.layer
    if begun is None or not isinstance(module, Attention):
        return None
    for name, node in tree.nodes.items():
        merged = node.layer
        if not name.startswith(path + ".") or not isinstance(merged, QKVParallelLinear):
            continue
        if isinstance(node.layouts.of("output", (0,)), Unknown):
            continue
        made = probe.at(name, "output")
        cut = (merged.num_heads, merged.num_kv_heads, merged.head_size, merged.v_head_size)
        if made is None or cut != (module.num_heads, module.num_kv_heads, module.head_size, module.head_size_v):
            continue
        values = begun.tensors.get((0, 2))
        merged_rows = made.tensors.get((0,))
        width = merged.num_kv_heads * merged.v_head_size
        # Values are neither rotated nor normalised, so they show that this projection feeds this kernel.
        if values is None or merged_rows is None:
            continue
        if same(values.reshape(values.shape[0], -1), merged_rows[:, -width:]):
            return node
    return None


def _out(tree: ModuleTree, probe: ProbeRun, kernel: Node, path: str) -> Node | None:
    ended, module = probe.at(kernel.path, "output"), kernel.layer
    if ended is None or not isinstance(module, Attention):
        return None
    width = module.num_heads * module.head_size_v
    for name, node in tree.nodes.items():
        row = node.layer
        if not name.startswith(path + ".") or not isinstance(row, RowParallelLinear):
            continue
        begun = probe.at(name, "input")
        full = begun is not None and begun.index > ended.index and row.input_is_parallel
        if full and row.input_size_per_partition == width:
            return node
    return None
