"""Finds the parts of a layer's attention: merged projection, kernel, output projection.

The parts are recognised by the engine's classes and sizes, and by what a recorded forward passed between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase

from executor.model.items import Path
from executor.model.layouts import Columns, HeadColumns, Unknown
from executor.model.node import Node
from executor.model.tree import ModuleTree
from executor.views.probe import Event, ProbeRun, same


@dataclass(frozen=True)
class Heads:
    """A layer's attention.

    Attributes:
        path: the path of the module that holds all of the attention.
        kernel: the engine's attention kernel.
        projection: the merged q/k/v projection; None if the architecture has none that feeds the kernel.
        out: the projection of the heads' outputs; None if there is none.
        why: what a refusal says about values that need a missing part.
        gated: whether each query head of the projection's output has a gate of the same width behind it.
        norms: the norms of queries ("q"), keys ("k") and values ("v"), where the architecture has them: the module, and where its
            result is in what it returns.
        queries: of a layer without keys of its own, the projection of its queries.
    """

    path: str
    kernel: Node
    projection: Node | None
    out: Node | None
    why: str
    norms: dict[str, tuple[Node, Path]] = field(default_factory=dict)
    gated: bool = False
    queries: Node | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of query heads and of key/value heads of the whole model."""
        module = self.projection.layer if self.projection is not None else None
        if self.queries is not None:
            alone: Any = self.queries.layer
            return int(alone.output_size) // self.widths[0], 0
        assert isinstance(module, QKVParallelLinear)
        return module.total_num_heads // (2 if self.gated else 1), module.total_num_kv_heads

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of a query or key head, and of a value head."""
        kernel = self.kernel.layer
        assert isinstance(kernel, Attention)
        return kernel.head_size, kernel.head_size_v


def find_heads(tree: ModuleTree, probe: ProbeRun, kernel: Node, layer: str) -> Heads:
    """Return the attention around a kernel inside a layer."""
    path = kernel.path
    while path != layer and not isinstance(kernel.layer, MambaBase):  # a mixer holds its projections
        path = path.rpartition(".")[0]
        below = [node for name, node in tree.nodes.items() if name.startswith(path + ".")]
        if any(isinstance(node.layer, RowParallelLinear | QKVParallelLinear) for node in below):
            break
    projection, gated = _projection(tree, probe, kernel, path)
    out = _out(tree, probe, kernel, path)
    why = "the engine has no merged projection here that feeds its attention kernel"
    if gated and not _gates(probe, kernel, projection, out):
        projection = None
        why = "which columns of the merged projection are queries and which are gates could not be established"
    if projection is None:
        alone = _queries_alone(tree, probe, kernel, path)
        if alone is not None:
            return Heads(
                path, kernel, None, out, why, _norms_of_queries(tree, probe, kernel, alone, path), queries=alone
            )
    return Heads(path, kernel, projection, out, why, _norms(tree, probe, kernel, projection, path), gated)


def _projection(tree: ModuleTree, probe: ProbeRun, kernel: Node, path: str) -> tuple[Node | None, bool]:
    """Return the merged projection, and whether it has gates beside its queries."""
    begun, module = probe.at(kernel.path, "input"), kernel.layer
    if begun is None or not isinstance(module, Attention):
        return None, False
    for name, node in tree.nodes.items():
        merged = node.layer
        if not name.startswith(path + ".") or not isinstance(merged, QKVParallelLinear):
            continue
        if isinstance(node.layouts.of("output", (0,)), Unknown):
            continue
        made = probe.at(name, "output")
        cut = (merged.num_kv_heads, merged.head_size, merged.v_head_size)
        gated = merged.num_heads == 2 * module.num_heads
        if made is None or cut != (module.num_kv_heads, module.head_size, module.head_size_v):
            continue
        if merged.num_heads != module.num_heads and not gated:
            continue
        values = begun.tensors.get((0, 2))
        merged_rows = made.tensors.get((0,))
        width = merged.num_kv_heads * merged.v_head_size
        # Values are not rotated, so they show that this projection feeds this kernel; a norm of them may lie between.
        if values is None or merged_rows is None:
            continue
        given, columns = values.reshape(values.shape[0], -1), merged_rows[:, -width:]
        if same(given, columns) or _through_norm(tree, probe, path, columns, given):
            return node, gated
    return None, False


def _through_norm(
    tree: ModuleTree, probe: ProbeRun, path: str, columns: torch.Tensor, given: torch.Tensor
) -> bool:  # [tokens, heads * width] each
    """Return whether a module makes of some columns alone what the kernel is given."""
    for name in tree.nodes:
        begun, ended = probe.at(name, "input"), probe.at(name, "output")
        if not name.startswith(path + ".") or begun is None or ended is None:
            continue
        taken = [one for one in begun.tensors.values() if one.is_floating_point()]
        made = list(ended.tensors.values())
        if len(taken) == 1 and _equal(taken[0], columns) and any(_equal(one, given) for one in made):
            return True
    return False


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:  # any shapes
    """Return whether two tensors have the same numbers in any shape."""
    return one.numel() == other.numel() and torch.equal(one.reshape(other.shape), other)


def _queries_alone(tree: ModuleTree, probe: ProbeRun, kernel: Node, path: str) -> Node | None:
    """Return the projection of queries of a layer that uses an earlier layer's keys."""
    module = kernel.layer
    if not isinstance(module, Attention) or module.kv_sharing_target_layer_name is None:
        return None
    found = []
    for name, node in tree.nodes.items():
        layer = node.layer
        if not name.startswith(path + ".") or not isinstance(layer, ColumnParallelLinear):
            continue
        if probe.at(name, "output") and layer.output_size_per_partition == module.num_heads * module.head_size:
            found.append(node)
    if len(found) != 1 or isinstance(found[0].layouts.of("output", (0,)), Unknown):
        return None
    for kind, at, width in (("input", (0, 0), module.head_size), ("output", (), module.head_size_v)):
        kernel.layouts.know(kind, at, Columns([(module.num_heads * width, 1)]))
    return found[0]


def _norms_of_queries(
    tree: ModuleTree, probe: ProbeRun, kernel: Node, projection: Node, path: str
) -> dict[str, tuple[Node, Path]]:
    made, module = probe.at(projection.path, "output"), kernel.layer
    linear: Any = projection.layer
    assert made is not None and isinstance(module, Attention)
    cut = _Cut(module.num_heads, module.head_size, 1, linear.tp_size, linear.tp_rank)
    found = _norm_of(tree, probe, kernel, path, made.index, made.tensors[(0,)], cut)
    return {} if found is None else {"q": found}


def _query_columns(
    merged: torch.Tensor, heads: int, width: int, gated: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return queries, and gates if there are any, [tokens, heads * width] each."""
    if not gated:
        return merged[:, : heads * width], None
    queries, gates = merged[:, : 2 * heads * width].unflatten(-1, (heads, 2 * width)).split(width, dim=-1)
    return queries.flatten(-2), gates.flatten(-2)


def _gates(probe: ProbeRun, kernel: Node, projection: Node | None, out: Node | None) -> bool:
    """Return whether heads' outputs are multiplied with the sigmoid of the gates."""
    module = kernel.layer
    assert isinstance(module, Attention)
    made = probe.at(projection.path, "output") if projection is not None else None
    ended, begun = probe.at(kernel.path, "output"), probe.at(out.path, "input") if out is not None else None
    if made is None or ended is None or begun is None:
        return False
    _, gates = _query_columns(made.tensors[(0,)], module.num_heads, module.head_size, True)
    returned, given = ended.tensors.get(()), begun.tensors.get((0, 0))
    if gates is None or returned is None or given is None or returned.numel() != gates.numel():
        return False
    return same(given, returned.reshape(gates.shape) * gates.sigmoid())


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


def _norms(
    tree: ModuleTree, probe: ProbeRun, kernel: Node, projection: Node | None, path: str
) -> dict[str, tuple[Node, Path]]:
    """Return the norms of queries, keys and values, by `q`, `k` and `v`."""
    made = probe.at(projection.path, "output") if projection is not None else None
    merged = projection.layer if projection is not None else None
    if projection is None or made is None or not isinstance(merged, QKVParallelLinear):
        return {}
    found: dict[str, tuple[Node, Path]] = {}
    module = kernel.layer
    assert isinstance(module, Attention)
    merged_rows, copies = made.tensors[(0,)], merged.num_kv_head_replicas
    queries, _ = _query_columns(merged_rows, module.num_heads, module.head_size, merged.num_heads != module.num_heads)
    sizes = [merged.num_heads * merged.head_size, merged.num_kv_heads * merged.head_size]
    _, keys, values = merged_rows.split([*sizes, merged_rows.shape[1] - sum(sizes)], dim=-1)
    parts = (("q", queries, module.num_heads, 1), ("k", keys, merged.num_kv_heads, copies))
    for one, columns, heads, shared in (*parts, ("v", values, merged.num_kv_heads, copies)):
        width = merged.v_head_size if one == "v" else merged.head_size
        cut = _Cut(heads, width, shared, merged.tp_size, merged.tp_rank)
        norm = _norm_of(tree, probe, kernel, path, made.index, columns, cut)
        if norm is not None:
            found[one] = norm
    return found


def _norm_of(
    tree: ModuleTree, probe: ProbeRun, kernel: Node, path: str, after: int, columns: torch.Tensor, cut: _Cut
) -> tuple[Node, Path] | None:  # columns: [tokens, heads * width]
    """Return the module that is given some columns alone, if the model goes on with its result."""
    for name, node in tree.nodes.items():
        if not name.startswith(path + ".") or node is kernel:
            continue
        begun, ended = probe.at(name, "input"), probe.at(name, "output")
        if begun is None or ended is None or begun.index < after:
            continue
        given = [at for at, tensor in begun.tensors.items() if cut.holds(tensor, columns)]
        rows = [tensor for tensor in begun.tensors.values() if tensor.is_floating_point()]
        later = [event for event in probe.after(ended.index, "input") if event.path.startswith(path + ".")]
        if len(given) != 1 or len(rows) != 1:  # a rotation is given queries and keys
            continue
        for at, tensor in ended.tensors.items():
            result = cut.mine(tensor)
            if tensor.shape == rows[0].shape and result is not None and _goes_on(result, later):
                cut.note(node, tensor, given[0], at)
                return node, at
    return None


@dataclass(frozen=True)
class _Cut:
    """How queries or keys lie on this rank.

    Attributes:
        heads, width: the number of heads on this rank, and the width of a head.
        copies: how many consecutive ranks hold the same heads.
        ranks, rank: the number of tensor-parallel ranks, and which of them this is.
    """

    heads: int
    width: int
    copies: int
    ranks: int
    rank: int

    def mine(self, tensor: torch.Tensor) -> torch.Tensor | None:  # any shape -> [tokens, heads * width]
        """Return this rank's part of heads side by side; None if the tensor has another size."""
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return None
        rows = tensor.reshape(tensor.shape[0], -1)
        columns = self.heads * self.width
        if rows.shape[1] == columns:
            return rows
        if rows.shape[1] == columns * self.ranks // self.copies:
            start = self.rank // self.copies * columns
            return rows[:, start : start + columns]
        return None

    def holds(self, tensor: torch.Tensor, columns: torch.Tensor) -> bool:  # any shape; [tokens, heads * width]
        """Return whether a tensor has some columns of this rank as its part."""
        found = self.mine(tensor)
        return found is not None and torch.equal(found, columns)

    def note(self, node: Node, tensor: torch.Tensor, given: Path, returned: Path) -> None:  # any shape
        """Have a norm's values put together over the ranks as the projection's columns are."""
        if tensor[0].numel() != self.heads * self.width:
            return  # the ranks hold all heads
        layout = HeadColumns(self.width, self.heads, self.copies)
        for kind, at in (("input", given), ("output", returned)):
            node.layouts.know(kind, at, layout if tensor.dim() == 3 else Columns(layout.parts))


def _goes_on(result: torch.Tensor, later: list[Event]) -> bool:  # [tokens, heads * width]
    """Return whether a later module is given a tensor, in any shape."""
    return any(_equal(tensor, result) for event in later for tensor in event.tensors.values())
