"""Weights of the model as blocks read them.

They are whole over the tensor-parallel ranks, and private copies that cannot be written to. How a weight is cut over the
ranks follows from the layer that has it, as for the layer's values (`executor.model.layouts`): rows of the weight make the
columns of an output, columns of the weight take the columns of an input. A weight of any other module is given if all ranks
hold the same. Everything is read by rows, a bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from executor.core.errors import Refusal
from executor.model.bits import digest
from executor.model.layouts import Columns
from executor.model.node import Node
from executor.model.remote_module import RemoteModule, names_of
from interpose.contract.names import Name, read_only, written
from interpose.v1 import model_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import DType
from interpose.wire.arrays import dtype_of

_CHUNK_BYTES = 8 << 20
_MAX_PRODUCTS = 100_000_000_000  # to get a weight back out of a kernel that has repacked it
_NORMS = (RMSNorm, GemmaRMSNorm, torch.nn.LayerNorm)
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

Pick = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    """What a block wants of a parameter.

    Attributes:
        name: the parameter's or buffer's.
        rows: which rows; None: all.
    """

    name: str
    rows: tuple[int, ...] | None = None


def described(module: torch.nn.Module) -> list[model_pb2.Parameter]:
    """Describe a module's own parameters and buffers with their whole shapes."""
    if isinstance(module, RemoteModule):
        return list(module.described.parameters)
    found = []
    for name in names_of(module):
        tensor = getattr(module, name)
        dtype: Any = dtype_of(tensor.dtype)
        found.append(model_pb2.Parameter(name=name, shape=whole_shape(module, name, tensor), dtype=dtype))
    return found


def whole_shape(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> list[int]:  # any shape
    """Return a parameter's shape before any cut over ranks or repacking by a kernel.

    Linear layers say their sizes themselves; some backends repack their weights after loading, so the tensors do not.
    """
    if isinstance(module, LinearBase) and name in ("weight", "bias"):
        width = module.output_size
        if isinstance(module, QKVParallelLinear):
            width = module.total_num_heads * module.head_size
            width += module.total_num_kv_heads * (module.head_size + module.v_head_size)
        return [width, module.input_size] if name == "weight" else [width]
    if isinstance(module, VocabParallelEmbedding):
        return [module.num_embeddings, module.embedding_dim] if name == "weight" else [module.num_embeddings]
    return list(parameter.shape)


class Parameters:
    """Reads the weights of one worker's model.

    Args:
        tp_size: the tensor-parallel size.
        memory_bytes: that one block may use.
        widths: the model's hidden size and its heads' width.
    """

    def __init__(self, tp_size: int, memory_bytes: int, widths: Sequence[int]) -> None:
        self._tp_size = tp_size
        self._most = memory_bytes // 2  # beside the copy there is what it is made of
        self._widths = frozenset(widths)

    # The block's side.

    def open(
        self, node: Node, name: str, read: Callable[[Wanted], torch.Tensor]
    ) -> Any:  # the parameter's whole shape, or [rows, ...]
        """Return a parameter as a tensor, or as an object that gives its rows.

        A parameter that a block has no room for is given by rows.

        Args:
            read: has the ranks read it.
        """
        assert node.layer is not None
        [found] = [one for one in described(node.layer) if one.name == name]
        shape, dtype = torch.Size(found.shape), torch_dtype(found.dtype)
        where = f"{written(node.path)}.{name}"
        count = shape.numel()
        if count * dtype.itemsize <= self._most:
            return read(Wanted(name))
        refusal = refuse_write(node.path, name)
        return Large(where, shape, dtype, lambda rows: read(Wanted(name, rows)), self._most, refusal)

    # The engine's side: all ranks are here.

    def read(self, node: Node, wanted: Wanted) -> torch.Tensor:  # the parameter's whole shape, or [rows, ...]
        """Return a parameter, or rows of it, whole, as a copy for the block.

        Every tensor-parallel rank calls it.

        Raises:
            Refusal: it is packed, or how it is cut is not known; the same on every rank.
        """
        layer, name = node.layer, wanted.name
        assert layer is not None
        where = f"{written(node.path)}.{name}"
        tensor = getattr(layer, name).detach()
        self._check(layer, name, tensor, where)
        with torch.inference_mode(False), torch.no_grad():
            pick, packed = self._picker(layer, name, tensor, where)
            fetch = self._fetcher(node, layer, name, tensor, pick, where)
            shape = whole_shape(layer, name, tensor)
            if not shape:
                return tensor.clone()
            rows = torch.arange(shape[0]) if wanted.rows is None else torch.tensor(wanted.rows, dtype=torch.int64)
            rows = rows.to(tensor.device)
            whole = torch.empty([len(rows), *shape[1:]], dtype=tensor.dtype, device=tensor.device)
            row_bytes = max(1, whole[:1].nbytes)
            step = max(1, len(rows) if packed else _CHUNK_BYTES // row_bytes)
            for start in range(0, len(rows), step):
                part = fetch(rows[start : start + step])
                if part.shape[1:] != whole.shape[1:]:
                    raise not_given(
                        where, f"it has rows of shape {list(part.shape[1:])} where {shape[1:]} was expected"
                    )
                whole[start : start + step] = part
            return whole

    def _check(
        self, layer: torch.nn.Module, name: str, tensor: torch.Tensor, where: str
    ) -> None:  # this rank's part, any shape
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, RoutedExperts):
            raise not_given(where, "the weights of fused experts are kept as their kernel needs them")
        if method is not None and not isinstance(method, _PLAIN):
            raise not_given(where, f"the layer's weights are quantised ({type(method).__name__})")
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.int32, torch.bool)):
            raise not_given(where, f"it is kept as {tensor.dtype}, which is no number of its own")
        if tensor.element_size() < 2 and tensor.dtype is not torch.bool:
            raise not_given(where, f"it is kept as {tensor.dtype}, with scales beside it")
        if isinstance(layer, LinearBase) and name == "weight" and tensor.dim() != 2 and tensor.numel():
            raise not_given(where, "the layer's weight is no matrix")

    def _picker(
        self, layer: Any, name: str, tensor: torch.Tensor, where: str
    ) -> tuple[Pick, bool]:  # this rank's part, [out, in]
        """Return a function that gives this rank's rows by their numbers.

        It is returned too whether the rows come out of a repacked weight.
        """
        if tensor.numel() or not isinstance(layer, LinearBase) or name != "weight":
            return (lambda rows: tensor[rows]), False
        kernel = getattr(layer, "cpu_linear", None)
        width = getattr(layer, "input_size_per_partition", layer.input_size)
        height = getattr(layer, "output_size_per_partition", layer.output_size)
        if kernel is None or layer.params_dtype != tensor.dtype:
            raise not_given(where, "its kernel has repacked the weight")
        if width * width * height > _MAX_PRODUCTS:
            raise not_given(where, "its kernel has repacked the weight, which is too large to be got back")

        def pick(rows: torch.Tensor) -> torch.Tensor:  # [rows] -> [rows, width]
            """Multiply the identity with the weight.

            Each number of the product is exactly one number of the weight.
            """
            found = torch.empty(len(rows), width, dtype=tensor.dtype)
            step = max(1, _CHUNK_BYTES // (max(width, height) * tensor.element_size()))
            for start in range(0, width, step):
                ones = torch.zeros(min(step, width - start), width, dtype=tensor.dtype)
                ones[torch.arange(len(ones)), torch.arange(start, start + len(ones))] = 1
                found[:, start : start + step] = kernel(ones, layer.weight, None)[:, rows].t()
            if not torch.isfinite(found).all():
                raise not_given(where, "its kernel has repacked the weight, and not all of its numbers are finite")
            return found

        return pick, True

    def _fetcher(
        self, node: Node, layer: Any, name: str, tensor: torch.Tensor, pick: Pick, where: str
    ) -> Pick:  # this rank's part, [out, in]
        """Return what gives rows of the whole parameter by their numbers, on every rank."""
        parts = getattr(layer, "tp_size", 1) if isinstance(layer, LinearBase | VocabParallelEmbedding) else 1
        if self._tp_size == 1:
            return pick
        if parts > 1 and isinstance(layer, VocabParallelEmbedding):
            if layer.num_embeddings != layer.org_vocab_size:
                raise not_given(where, "the vocabulary has tokens that were added")
            segments = vocabulary_segments(self._tp_size, layer.num_embeddings_per_partition, layer.num_embeddings)
            return _by_rows(segments, pick, tensor.device)
        if parts > 1 and isinstance(layer, ColumnParallelLinear) and name in ("weight", "bias"):
            layout = node.layouts.of("output", (0,))
            if not isinstance(layout, Columns):
                raise not_given(where, "how the layer's outputs are cut over the tensor-parallel ranks is not known")
            return _by_rows(_segments(layout, self._tp_size), pick, tensor.device)
        if parts > 1 and isinstance(layer, RowParallelLinear) and name == "weight":
            if not isinstance(node.layouts.of("input", (0, 0)), Columns):
                raise not_given(where, "how the layer's inputs are cut over the tensor-parallel ranks is not known")
            return lambda rows: get_tp_group().all_gather(pick(rows).contiguous(), dim=-1)
        self._check_same(layer, tensor, where)
        return pick

    def _check_same(
        self, layer: torch.nn.Module, tensor: torch.Tensor, where: str
    ) -> None:  # this rank's part, any shape
        """Refuse a parameter that is not the same on all ranks.

        A parameter whose numbers are all one is refused too: it would look the same in any case.
        """
        if not tensor.numel() and isinstance(layer, ReplicatedLinear):
            return
        mine = torch.tensor([_digest(tensor), tensor.numel()], dtype=torch.int64)
        group = get_tp_group()
        theirs = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(theirs, mine, group=group.cpu_group)
        if not all(torch.equal(mine, other) for other in theirs):
            raise not_given(where, "it is cut over the tensor-parallel ranks in a way that is not known")
        known = isinstance(layer, ReplicatedLinear | RowParallelLinear) or (
            isinstance(layer, _NORMS) and tensor.dim() == 1 and len(tensor) in self._widths
        )
        if not known and tensor.numel() and bool(tensor.min() == tensor.max()):
            raise not_given(
                where, "all its numbers are the same, so whether a tensor-parallel rank holds all of them is not known"
            )


def _segments(layout: Columns, ranks: int) -> list[tuple[int, int, int]]:
    """Return where the whole rows are, one after the other: rank, first row there, how many."""
    found, offset = [], 0
    for width, copies in layout.parts:
        found += [(rank, offset, width) for rank in range(0, ranks, copies)]
        offset += width
    return found


def vocabulary_segments(ranks: int, height: int, tokens: int) -> list[tuple[int, int, int]]:
    """Return where the rows of the tokens are, as `_segments`; the last ranks may have padding.

    Args:
        height: rows on each rank.
        tokens: in the vocabulary.
    """
    counts = [min(height, tokens - rank * height) for rank in range(ranks)]
    return [(rank, 0, count) for rank, count in enumerate(counts) if count > 0]


def _by_rows(segments: Sequence[tuple[int, int, int]], pick: Pick, device: torch.device) -> Pick:
    owners = torch.cat([torch.full((count,), rank) for rank, _, count in segments]).to(device)
    order = torch.cat([torch.arange(first, first + count) for _, first, count in segments]).to(device)

    def fetch(rows: torch.Tensor) -> torch.Tensor:  # [rows] -> [rows, ...]
        mine = pick(order[rows]).contiguous()
        group = get_tp_group()
        everyone = group.all_gather(mine, dim=0).view(group.world_size, *mine.shape)
        return everyone[owners[rows], torch.arange(len(rows), device=device)]

    return fetch


def _digest(tensor: torch.Tensor) -> int:  # any shape
    """Return a number that differs where the contents do.

    The computation takes no more memory than a chunk.
    """
    total = 0
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), 1 << 20):
        total = (total * 31 + int(digest(flat[start : start + (1 << 20)]))) & ((1 << 62) - 1)
    return total


def not_given(where: str, why: str) -> Refusal:
    """The error for a weight that is not given, with what to write instead."""
    message = f"{where} cannot be given: {why}. Apply the module to values instead: {where.rpartition('.')[0]}(…)"
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=where)


def refuse_write(path: str, name: str) -> Refusal:
    """The error for a write to a weight."""
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, read_only(path, name), location=f"{path}.{name}")


def torch_dtype(number: int) -> torch.dtype:
    """Return the torch type of a number of the protocol."""
    name = DType.Name(number).removeprefix("DTYPE_").lower()
    found: torch.dtype = getattr(torch, name)
    return found


class Large(Name):
    """A parameter that is larger than a block has room for: its rows are read, a few at a time.

    Args:
        where: what a block calls it.
        shape, dtype: of the whole.
        read: reads rows by their numbers.
        most: bytes of the rows that may be read at once.
        refusal: of a write.
    """

    __slots__ = ("_most", "_read", "_refusal", "_where", "dtype", "shape")

    def __init__(
        self,
        where: str,
        shape: torch.Size,
        dtype: torch.dtype,
        read: Callable[[tuple[int, ...]], torch.Tensor],
        most: int,
        refusal: Refusal,
    ) -> None:
        self._where, self._read, self._most, self._refusal = where, read, most, refusal
        self.shape, self.dtype = shape, dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        first, *rest = key if isinstance(key, tuple) else (key,)
        rows = self._rows(first)
        if len(rows) * self.shape[1:].numel() * self.dtype.itemsize > self._most:
            self._misused(f"read {len(rows)} rows at once")
        found = self._read(rows)
        found = found[0] if isinstance(first, int) else found
        return (
            found[(..., *rest)] if rest and isinstance(first, int) else found[(slice(None), *rest)] if rest else found
        )

    def _rows(self, key: Any) -> tuple[int, ...]:
        count = self.shape[0]
        if isinstance(key, slice):
            return tuple(range(*key.indices(count)))
        if isinstance(key, torch.Tensor) and not key.is_floating_point() and key.dtype is not torch.bool:
            key = key.tolist()
        keys = key if isinstance(key, list) else [key]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in keys):
            self._misused("indexed so")
        if any(not -count <= one < count for one in keys):
            raise IndexError(f"{self._where} has {count} rows, and was asked for {keys if len(keys) < 9 else 'others'}")
        return tuple(one % count for one in keys)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise self._refusal

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._misused(f"asked for {name!r}")

    def _misused(self, used: str, then: str = "") -> NoReturn:
        size = self.shape.numel() * self.dtype.itemsize >> 20
        message = (
            f"{self._where} has {size} MiB, more than the {self._most >> 20} MiB of weights that a block has room for, so it "
            f"cannot be {used}; read some of its rows, {self._where}[token] or {self._where}[a:b], or apply the module to values"
        )
        raise Refusal(pb.ERROR_CODE_QUOTA_EXCEEDED, message, location=self._where)

    def _same(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self._where}: {list(self.shape)}, {self.dtype}>"
