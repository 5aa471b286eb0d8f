"""How attention backends lay out their caches, and which numbers in a cache are sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Keys and values below it give finite sums of products in float32 and bfloat16, also those of later steps.
LARGEST = 1e18
# Half precision ends at 65504, and what a layer makes of a value may be some ten times as large.
_LARGEST = {torch.float16: 4096.0}


# Types of caches whose elements are the numbers themselves, without scales packed beside them.
PLAIN_CACHES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Parts:
    """How a block of a cache lies in memory: some pieces of equal length, each without gaps.

    All numbers count elements.

    Attributes:
        block: from one block to the next.
        count: the pieces.
        stride: from one piece to the next.
        length: of a piece.
    """

    block: int
    count: int
    stride: int
    length: int

    @classmethod
    def of(cls, cache: torch.Tensor, dim: int) -> Parts | None:  # [blocks, ...] or [2, blocks, ...]
        """Return the parts of a cache's blocks; None if they lie in another way.

        Args:
            cache: the cache.
            dim: the dimension that numbers the blocks.
        """
        rest = sorted((cache.stride(i), cache.shape[i]) for i in range(cache.dim()) if i != dim and cache.shape[i] > 1)
        length = 1
        while rest and rest[0][0] == length:
            length *= rest.pop(0)[1]
        if len(rest) > 1:
            return None
        stride, count = rest[0] if rest else (0, 1)
        return cls(cache.stride(dim), count, stride, length)


@dataclass(frozen=True)
class GuardedCache:
    """The cache of one attention layer.

    Attributes:
        name: the layer's name.
        layer: the layer.
        cache: [blocks, tokens, ...] or [2, blocks, ...].
        dim: the dimension of the cache that numbers its blocks.
        slots: the tokens of a block.
        parts: how a block lies in memory.
    """

    name: str
    layer: Any
    cache: torch.Tensor
    dim: int
    slots: int
    parts: Parts | None

    @classmethod
    def of(cls, name: str, layer: Any) -> GuardedCache | None:
        """Return the cache of a layer, None if it has none that can be checked."""
        cache = getattr(layer, "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or cache.dim() < 3 or not is_plain(layer, cache):
            return None
        dim, slots = layout(layer, cache)
        return cls(name, layer, cache, dim, slots, Parts.of(cache, dim))

    @property
    def kind(self) -> torch.dtype:
        """The dtype of the numbers; caches may have them as bytes."""
        return _kind(self.layer, self.cache)

    def clean(self, slots: torch.Tensor, owners: torch.Tensor, flags: torch.Tensor) -> None:
        """Do for one cache what `CacheGuard.launch` says; may wait for the device.

        Args:
            slots: [rows], where the row's keys and values went; negative: nowhere.
            owners, flags: as of `CacheGuard.launch`.
        """
        wanted = (slots >= 0) & (owners >= 0)
        blocks, which = torch.unique(slots[wanted].to(torch.int64) // self.slots, return_inverse=True)
        if not blocks.numel():
            return
        stored = self.cache.index_select(self.dim, blocks).movedim(self.dim, 0).flatten(1)
        numbers = stored.view(self.kind) if stored.dtype == torch.uint8 else stored
        numbers = numbers if numbers.dtype.itemsize > 1 else numbers.float()
        sound = numbers.abs().amax(1).float() <= largest(self.kind)  # NaN is not
        self.cache.index_fill_(self.dim, blocks[~sound], 0)
        flags.index_fill_(0, owners[wanted][~sound[which]].to(torch.int64), 1)


def layout(layer: Any, cache: torch.Tensor) -> tuple[int, int]:  # [blocks, tokens, ...] or [2, blocks, ...]
    """Return the dimension of a layer's cache that numbers its blocks.

    The number of tokens in a block is returned too.
    """
    if cache.dim() == 3:  # of latent attention: [blocks, tokens, width]
        return 0, cache.shape[1]
    # Some backends keep keys and values in two halves before the blocks.
    dim = 1 if cache.dim() == 5 and cache.shape[0] == 2 else 0
    widths = layer.head_size + getattr(layer, "head_size_v", layer.head_size)
    return dim, cache.narrow(dim, 0, 1).numel() // (layer.num_kv_heads * widths)


def is_plain(layer: Any, cache: torch.Tensor) -> bool:  # [blocks, tokens, ...] or [2, blocks, ...]
    """Return whether a layer's cache holds plain keys and values only, one number each."""
    kind = str(getattr(layer, "kv_cache_dtype", "auto"))
    if kind not in PLAIN_CACHES or not (cache.is_floating_point() or (cache.dtype, kind[:3]) == (torch.uint8, "fp8")):
        return False
    width = getattr(layer, "head_size", None)
    if cache.dim() == 3:  # of latent attention; a packed key has more bytes than its head has numbers
        return cache.dtype.itemsize > 1 or cache.shape[2] == width
    if width is None:
        return False
    dim, slots = layout(layer, cache)
    widths = width + getattr(layer, "head_size_v", width)
    return slots in cache.shape and cache.narrow(dim, 0, 1).numel() == slots * layer.num_kv_heads * widths


def _kind(layer: Any, cache: torch.Tensor) -> torch.dtype:  # any shape
    """Return the dtype of the numbers in a cache."""
    kind = str(getattr(layer, "kv_cache_dtype", ""))
    if cache.dtype == torch.uint8 and kind.startswith("fp8"):
        return torch.float8_e5m2 if "e5m2" in kind else torch.float8_e4m3fn
    return cache.dtype


def largest(kind: torch.dtype) -> float:
    """Return the largest sound number of a dtype."""
    return _LARGEST.get(kind, LARGEST)
