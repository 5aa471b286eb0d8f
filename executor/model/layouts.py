"""Whole values from tensor-parallel shards, and back.

What a layer's tensors look like on one rank follows from the layer's class in vLLM, if `executor.model.cuts` finds that its
weights were loaded as the class loads them: a column-parallel output and a row-parallel input are slices of the last dimension
(for merged projections, one slice per merged part). Where it does not, the layout is `Unknown`, and refused. A row-parallel
output that is not reduced is a partial sum. Everything else must be the same on every rank, and that is checked, not assumed:
`Replicated` compares a fingerprint across ranks and refuses when they differ.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from executor.core.errors import Refusal
from executor.model.cuts import why_not_known
from interpose.v1 import trace_pb2 as pb


class Layout(Protocol):
    """How one tensor of a location is spread over the tensor-parallel ranks."""

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the whole value, [rows, ..., features], from this rank's rows.

        Every rank calls this.
        """

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole value, [rows, ..., features]."""


class Whole:
    """Every rank holds the whole value, by construction."""

    def gather(self, shard: torch.Tensor) -> torch.Tensor:  # [rows, ..., part] -> [rows, ..., features]
        return shard

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:  # [rows, ..., features] -> [rows, ..., part]
        return whole


def _levelled(value: torch.Tensor) -> torch.Tensor:  # any shape
    """Return a replicated value with the same bits on every rank.

    A sum over more than two ranks may be rounded differently on each rank, as vLLM's sums on CPUs are. The first rank's bits
    count then.
    """
    group = get_tp_group()
    if group.world_size <= 2:
        return value
    own = value.clone(memory_format=torch.contiguous_format)
    group.broadcast(own.view(torch.uint8), src=0)  # as bytes, whatever the dtype
    return own


class Replicated:
    """Every rank should hold the same value; the first rows served prove it.

    A tensor inside a sharded region (an activation between a column- and a row-parallel layer, say) has a shape that
    looks complete. Handing out one rank's part of it would be a silently wrong value, so the ranks compare an exact
    fingerprint of the bits first, and where more than two ranks' bits differ, how far the values do. A location that passed
    once with a value that can tell ranks apart is not checked again.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._proven = False

    def gather(self, shard: torch.Tensor) -> torch.Tensor:  # [rows, ..., part] -> [rows, ..., features]
        if not self._proven:
            self._proven = self._tells(shard)
        return _levelled(shard)

    def gather_dummy(self, shard: torch.Tensor) -> torch.Tensor:  # [rows, ..., features]
        """Return the rows of a pass without a request; they prove nothing for later passes.

        A value with one number for each row (token ids, positions) cannot be a part of a wider value.

        Raises:
            Refusal: the ranks' values differ, or they would be equal in any case.
        """
        if shard.dim() > 1 and not self._proven and not self._tells(shard):
            raise Refusal(
                pb.ERROR_CODE_UNKNOWN_LOCATION,
                f"whether {self.location} is whole on every tensor-parallel rank is not known before a trace has read it once; "
                "read its shape in a model.trace(prompt)",
                location=self.location,
            )
        return shard

    def shown(self, shard: torch.Tensor) -> bool:  # [rows, ..., features]
        """Return whether a pass without a request shows that every rank holds the whole value.

        Every rank calls this. It proves nothing for later passes.
        """
        try:
            return self._proven or self._tells(shard)
        except Refusal:
            return False

    def _tells(self, shard: torch.Tensor) -> bool:  # any shape
        """Whether the ranks' values are equal where those of split ones would differ.

        Raises:
            Refusal: they differ.
        """
        group = get_tp_group()
        flat = shard.detach().contiguous().as_strided((shard.numel(),), (1,))
        bits = flat.view(torch.uint8).to("cpu", torch.int64)
        weights = torch.arange(1, bits.numel() + 1, dtype=torch.int64) % 65521
        mine = torch.stack([bits.sum(), (bits * weights).sum(), torch.tensor(bits.numel())])
        theirs = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(theirs, mine, group=group.cpu_group)
        equal = all(torch.equal(theirs[0], other) for other in theirs[1:])
        sizes = {int(one[2]) for one in theirs}
        if not equal and (len(sizes) > 1 or not self._rounded(shard)):
            raise Refusal(
                pb.ERROR_CODE_UNKNOWN_LOCATION,
                f"{self.location} is split over the tensor-parallel ranks in a way that is not known, so the whole value "
                "cannot be given. Read the input of the row-parallel layer after it, or the output of the column-parallel "
                "layer before it (for example mlp.down_proj.input or mlp.gate_up_proj.output[0]), which are given whole.",
                location=self.location,
            )
        first = _levelled(shard.detach())  # all ranks must come to the same answer
        values = torch.view_as_real(first) if first.is_complex() else first.to(torch.float64)
        return bool(values.numel() and torch.isfinite(values).all() and values.min() != values.max())

    @staticmethod
    def _rounded(shard: torch.Tensor) -> bool:  # any shape
        """Return whether the ranks' values differ only as sums with different rounding do.

        Parts of a value never differ in this way.
        """
        group = get_tp_group()
        if group.world_size <= 2 or not shard.is_floating_point() or not shard.numel():
            return False
        first = _levelled(shard).double()
        # Parts of one value differ as its numbers do among themselves, however large these are.
        size = torch.minimum(first.abs().max(), first.max() - first.min())
        allowed = max(1e-3, 8 * torch.finfo(shard.dtype).eps) * size
        near = torch.tensor([int((shard.double() - first).abs().max() <= allowed)])
        everyone = [torch.empty_like(near) for _ in range(group.world_size)]
        dist.all_gather(everyone, near, group=group.cpu_group)
        return all(bool(one) for one in everyone)

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:  # [rows, ..., features] -> [rows, ..., part]
        return whole


class Columns:
    """The last dimension is cut, part by part: rank r holds [part 0 of r | part 1 of r | …].

    Args:
        parts: for each merged part, its width on one rank and how many consecutive ranks hold the same slice (key and
            value heads are replicated where there are fewer of them than ranks).
    """

    def __init__(self, parts: list[tuple[int, int]]) -> None:
        self.parts = parts

    def gather(self, shard: torch.Tensor) -> torch.Tensor:  # [rows, ..., part] -> [rows, ..., features]
        group = get_tp_group()
        widths = [width for width, _ in self.parts]
        if shard.shape[-1] != sum(widths):
            raise RuntimeError(f"a column-parallel value of width {shard.shape[-1]} where {widths} was expected")
        whole = group.all_gather(shard.contiguous(), dim=-1)
        ranks = whole.split(shard.shape[-1], dim=-1)
        pieces = [rank.split(widths, dim=-1) for rank in ranks]
        return torch.cat(
            [
                pieces[rank][i]
                for i, (_, copies) in enumerate(self.parts)
                for rank in range(0, group.world_size, copies)
            ],
            dim=-1,
        )

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:  # [rows, ..., features] -> [rows, ..., part]
        group = get_tp_group()
        totals = [width * group.world_size // copies for width, copies in self.parts]
        mine = []
        for part, (width, copies) in zip(whole.split(totals, dim=-1), self.parts, strict=True):
            start = group.rank_in_group // copies * width
            mine.append(part[..., start : start + width])
        return torch.cat(mine, dim=-1)


class HeadColumns(Columns):
    """Heads in a dimension of their own, cut as their columns side by side are.

    Args:
        width: the width of a head.
        heads: the number of heads on one rank.
        copies: how many consecutive ranks hold the same heads.
    """

    def __init__(self, width: int, heads: int, copies: int) -> None:
        super().__init__([(heads * width, copies)])
        self._width = width

    def gather(self, shard: torch.Tensor) -> torch.Tensor:  # [rows, heads, width] -> [rows, all heads, width]
        return super().gather(shard.flatten(-2)).unflatten(-1, (-1, self._width))

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:  # [rows, all heads, width] -> [rows, heads, width]
        return super().scatter(whole.flatten(-2)).unflatten(-1, (-1, self._width))


class Partial:
    """Each rank holds a partial sum; the whole value is the sum over ranks."""

    def gather(self, shard: torch.Tensor) -> torch.Tensor:  # [rows, ..., part] -> [rows, ..., features]
        return _levelled(get_tp_group().all_reduce(shard.clone()))

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:  # [rows, ..., features] -> [rows, ..., part]
        # One rank carries the value, the others nothing, so that the later reduction gives it back exactly.
        return whole if get_tp_group().rank_in_group == 0 else torch.zeros_like(whole)


class Unknown:
    """The part that a rank holds is not known, so there is no whole value.

    Args:
        location: what errors call the location.
        why: the reason.
    """

    def __init__(self, location: str, why: str) -> None:
        self.location = location
        self.why = (
            f"which part of it each tensor-parallel rank holds is not known: {why}. Read and change what the layers around it "
            "give and take, or have the model served with tensor_parallel_size=1"
        )

    def gather(self, shard: torch.Tensor) -> NoReturn:  # [rows, ..., part] -> [rows, ..., features]
        raise self.refusal()

    def scatter(self, whole: torch.Tensor) -> NoReturn:  # [rows, ..., features] -> [rows, ..., part]
        raise self.refusal()

    def refusal(self) -> Refusal:
        """The error for using it."""
        return Refusal(
            pb.ERROR_CODE_UNKNOWN_LOCATION, f"{self.location} cannot be given: {self.why}", location=self.location
        )


WHOLE = Whole()


def _column_parts(layer: ColumnParallelLinear) -> list[tuple[int, int]]:
    tp_size = layer.tp_size
    if isinstance(layer, QKVParallelLinear):
        return [
            (layer.num_heads * layer.head_size, 1),
            (layer.num_kv_heads * layer.head_size, layer.num_kv_head_replicas),
            (layer.num_kv_heads * layer.v_head_size, layer.num_kv_head_replicas),
        ]
    if isinstance(layer, MergedColumnParallelLinear):
        return [(size // tp_size, 1) for size in layer.output_sizes]
    return [(layer.output_size_per_partition, 1)]


def _kernel_parts(
    kernel: Attention, projection: QKVParallelLinear
) -> dict[tuple[str, tuple[object, ...]], tuple[int, int]] | None:
    """Return how the tensors of an attention kernel are cut, if as the projection's are."""
    gated = projection.num_heads == 2 * kernel.num_heads  # a gate beside each query head
    if kernel.num_kv_heads != projection.num_kv_heads or not (gated or kernel.num_heads == projection.num_heads):
        return None
    copies = projection.num_kv_head_replicas
    queries = kernel.num_heads * kernel.head_size
    keys, values = kernel.num_kv_heads * kernel.head_size, kernel.num_kv_heads * kernel.head_size_v
    return {
        ("input", (0, 0)): (queries, 1),
        ("input", (0, 1)): (keys, copies),
        ("input", (0, 2)): (values, copies),
        ("output", ()): (kernel.num_heads * kernel.head_size_v, 1),
    }


class Layouts:
    """The layouts of one module's tensors, by location kind.

    Args:
        path: the module's path, for messages.
        module: the module itself.
        tp_size: the tensor-parallel size; with 1 every layout is `Whole`.

    Attributes:
        projection: of an attention kernel, the projection beside it, which says how its heads are cut.
    """

    def __init__(self, path: str, module: torch.nn.Module, tp_size: int) -> None:
        self.path = path
        self.module = module
        self.sharded = tp_size > 1
        self._tp_size = tp_size
        self._made: dict[tuple[str, tuple[object, ...]], Layout] = {}
        self.projection: QKVParallelLinear | None = None

    def of(self, kind: str, path: tuple[object, ...]) -> Layout:
        """Return the layout of one tensor.

        Args:
            kind: "input" or "output".
            path: keys into the value; for an input the value is `(args, kwargs)`.
        """
        if not self.sharded:
            return WHOLE
        layout = self._made.get((kind, path))
        if layout is None:
            layout = self._made[(kind, path)] = self._make(kind, path)
        return layout

    @property
    def ranks(self) -> int:
        """The tensor-parallel size."""
        return self._tp_size

    def main(self, kind: str) -> Layout:
        """Return the layout of the first tensor of a location.

        A linear layer of vLLM returns its bias beside its output, unless it is told not to.
        """
        if kind == "input":
            return self.of(kind, (0, 0))
        return self.of(kind, (0,) if getattr(self.module, "return_bias", False) else ())

    def know(self, kind: str, path: tuple[object, ...], layout: Layout) -> None:
        """Take it as shown that a tensor has a layout."""
        if self.sharded:
            self._made[(kind, path)] = layout

    def _make(self, kind: str, path: tuple[object, ...]) -> Layout:
        module = self.module
        location = f"{self.path}.{kind}" + "".join(f"[{key!r}]" for key in path)
        if isinstance(module, ColumnParallelLinear) and module.tp_size > 1:
            if kind == "output" and path in ((), (0,)):
                return self._columns(location, _column_parts(module), module.gather_output)
        elif isinstance(module, RowParallelLinear) and module.tp_size > 1:
            if kind == "input" and module.input_is_parallel and path in ((0, 0), (1, "input_")):
                return self._columns(location, [(module.input_size_per_partition, 1)])
            if kind == "output" and not module.reduce_results and path in ((), (0,)):
                return Partial()
        elif isinstance(module, Attention) and self.projection is not None:
            heads = _kernel_parts(module, self.projection)
            if heads is not None and (kind, path) in heads and not why_not_known(self.projection, self._tp_size):
                return Columns([heads[kind, path]])
        return Replicated(location)

    def _columns(self, location: str, parts: list[tuple[int, int]], gathered: bool = False) -> Layout:
        """Return the layout of a parallel linear layer's columns.

        Args:
            location: what errors call it.
            parts: as of `Columns`.
            gathered: whether the layer puts the ranks' parts side by side itself: parts of several are in another order then.
        """
        why = why_not_known(self.module, self._tp_size)
        if gathered and len(parts) > 1:
            why = why or "the layer gathers several parts, rank by rank"
        if why:
            return Unknown(location, why)
        return Replicated(location) if gathered else Columns(parts)
