"""Reads one request's keys and values out of the engine's paged cache.

Each backend stores blocks in a layout of its own, down to the order of single numbers. The layout is measured: the backend's
own function writes one block of a scratch cache, with keys and values that number themselves. The place of each number in the
block then says where each element of a key or value is kept.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention import Attention

from executor.model.kv_caches import layout

_BASE = 128  # Every floating-point format holds smaller whole numbers exactly.


def why_not_read(kernel: object) -> str:
    """Return why an attention kernel's keys and values cannot be read; "" if they can."""
    kind = str(getattr(kernel, "kv_cache_dtype", ""))
    cache = getattr(kernel, "kv_cache", None)
    numbers = not isinstance(cache, torch.Tensor) or not cache.numel() or cache.is_floating_point()
    if numbers and not kind.startswith(("fp8", "nvfp4", "int8")):
        return ""
    return f"the cache holds quantized keys (kv_cache_dtype {kind})"


class CachedKeys:
    """The cache of one attention kernel.

    Args:
        kernel: the kernel; its cache is allocated.

    Raises:
        ValueError: the cache is of a kind that cannot be read.
    """

    def __init__(self, kernel: Attention) -> None:
        cache = kernel.kv_cache
        update = getattr(kernel.impl, "do_kv_cache_update", None)
        if update is None or not isinstance(cache, torch.Tensor) or cache.dim() < 4:
            raise ValueError("the attention backend has no cache that can be read")
        if why := why_not_read(kernel):
            raise ValueError(why)
        self._kernel = kernel
        self._dim, _ = layout(kernel, cache)
        self._heads = kernel.num_kv_heads
        self._widths = (kernel.head_size, kernel.head_size_v)
        block = cache.narrow(self._dim, 0, 1)
        self._slots, rest = divmod(block.numel(), self._heads * sum(self._widths))
        if rest:
            raise ValueError("the cache's blocks hold more than keys and values")
        self._keys, self._values = self._measure(block)

    def _measure(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of each element of a block's keys and values in the flattened block.

        Returns:
            Two tensors [slots * heads * width]: one for keys, one for values.
        """
        counts = [self._slots * self._heads * width for width in self._widths]
        numbers = [torch.arange(count, device=block.device) for count in counts]
        found = torch.zeros(block.numel(), dtype=torch.int64, device=block.device)
        sign = torch.zeros_like(found)
        power = 1
        while power <= max(counts):
            scratch = torch.zeros_like(block)
            digits = [number // power % _BASE + 1 for number in numbers]
            key, value = (
                digit.reshape(self._slots, self._heads, width).to(block.dtype)
                for digit, width in zip(digits, self._widths, strict=True)
            )
            slots = torch.arange(self._slots, device=block.device)
            self._kernel.impl.do_kv_cache_update(self._kernel, key, -value, scratch, slots)
            flat = scratch.movedim(self._dim, 0).reshape(-1).float()
            sign = flat.sign().long()
            found += (flat.abs().long() - 1) * power
            power *= _BASE
        where = []
        for count, side in zip(counts, (1, -1), strict=True):
            positions = torch.nonzero(sign == side).flatten()
            index = torch.full((count,), -1, dtype=torch.int64, device=block.device)
            if len(positions) == count and int(found[positions].max()) < count:
                index[found[positions]] = positions
            if bool((index < 0).any()):
                raise ValueError("the layout of the cache could not be established")
            where.append(index)
        return where[0], where[1]

    def read(self, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a request's first `length` keys and values, each [length, heads, width].

        Args:
            blocks: the request's cache blocks in order, [blocks].
            length: the number of tokens in the cache, the tokens of this step included.
        """
        cache = self._kernel.kv_cache
        count = -(-length // self._slots)
        chosen = blocks[:count].to(cache.device, torch.int64)
        flat = cache.index_select(self._dim, chosen).movedim(self._dim, 0).reshape(count, -1)
        keys, values = (
            flat[:, index].reshape(count * self._slots, self._heads, width)[:length]
            for index, width in zip((self._keys, self._values), self._widths, strict=True)
        )
        return keys, values
