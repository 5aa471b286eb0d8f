"""Keeps numbers that are not finite out of the cache blocks that requests reuse.

The engine never clears a cache block. Attention kernels read whole blocks, and give the slots behind a request's own keys and
values a probability of zero. Zero times NaN is NaN, so a NaN that one request left there would reach the numbers of the next.

The numbers of plain requests are finite. A block can make any number. So the guard checks what a request added to the cache in
a step in which its block changed something. It does so when the model has run, before another request can read the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from executor.core.request import Span

# Keys and values below it give finite sums of products in float32 and bfloat16, also those of later steps.
LARGEST = 1e18
# Half precision ends at 65504, and what a layer makes of a value may be some ten times as large.
_LARGEST = {torch.float16: 4096.0}


# Types of caches whose elements are the numbers themselves, without scales packed beside them.
PLAIN_CACHES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class _Added:
    """A layer's cache blocks that a request added to in a step, with their largest number.

    The number is on the device and has not been waited for.
    """

    span: Span
    cache: torch.Tensor
    dim: int
    blocks: torch.Tensor
    largest: torch.Tensor


class CacheGuard:
    """Checks the caches of one worker's attention layers.

    Args:
        layers: the model's layers by name, as the engine keeps them. Layers without a cache are passed over.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        self._layers = layers

    @cached_property
    def why_not_looked_at(self) -> str:
        """Return why the cache cannot be checked, so that blocks may only read; "" if it can.

        A model may choose the format of its cache itself, after the engine's configuration was checked. The format is known
        when the cache is allocated.
        """
        for name, layer in self._layers.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.dim() >= 3 and not _plain(layer, cache):
                kind = str(getattr(layer, "kv_cache_dtype", "")) or str(cache.dtype).removeprefix("torch.")
                return (
                    f"{name} keeps its keys packed ({kind}), and what is not finite among packed keys could not be kept from "
                    "other requests; the logits and the samples can be changed, all else can be read"
                )
        return ""

    def clean(self, spans: Iterable[Span]) -> list[Span]:
        """Zero the cache blocks with values that are not finite; return the requests that left them.

        Called when the model has run, in its forward context, which says for each layer and token where its keys and values
        went, whatever the attention's backend. Only these blocks are looked at; no two requests add to the same one.

        Args:
            spans: the requests, as they are in the batch.
        """
        context = get_forward_context()
        if context.attn_metadata is None:
            return []
        spans = list(spans)
        mapping = context.slot_mapping if isinstance(context.slot_mapping, dict) else {}
        added: list[_Added] = []
        known: dict[tuple[int, int, Span], torch.Tensor] = {}  # layers have them in common
        for name, layer in self._layers.items():
            cache = getattr(layer, "kv_cache", None)
            if not isinstance(cache, torch.Tensor) or cache.dim() < 3 or not _plain(layer, cache):
                continue
            if name not in mapping:
                return spans  # nobody can tell what is in it
            dim, slots = layout(layer, cache)
            for span in spans:
                key = (mapping[name].data_ptr(), slots, span)
                if key not in known:
                    known[key] = _blocks(mapping[name][span.start : span.stop], slots).to(cache.device)
                blocks = known[key]
                if blocks.numel():
                    numbers = _numbers(layer, cache.index_select(dim, blocks))
                    added.append(_Added(span, cache, dim, blocks, numbers.abs().amax().float()))
        if not added:
            return []
        largest = _LARGEST.get(added[0].cache.dtype, LARGEST)
        sound = (torch.stack([one.largest for one in added]) <= largest).tolist()  # NaN is not
        spoilt = [one for one, is_sound in zip(added, sound, strict=True) if not is_sound]
        for one in spoilt:
            one.cache.index_fill_(one.dim, one.blocks, 0)
        return [span for span in spans if any(one.span == span for one in spoilt)]


def _blocks(mapping: torch.Tensor, slots: int) -> torch.Tensor:  # mapping: [tokens]; returns [blocks]
    """Return the blocks of so many slots that some slots lie in; a negative one stands for none."""
    return torch.unique(mapping[mapping >= 0].to(torch.int64) // slots)


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


def _plain(layer: Any, cache: torch.Tensor) -> bool:  # [blocks, tokens, ...] or [2, blocks, ...]
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


def _numbers(layer: Any, stored: torch.Tensor) -> torch.Tensor:  # any shape
    """Return what is stored as numbers that can be compared."""
    kind = str(getattr(layer, "kv_cache_dtype", ""))
    if stored.dtype == torch.uint8 and kind.startswith("fp8"):
        stored = stored.view(torch.float8_e5m2 if "e5m2" in kind else torch.float8_e4m3fn)
    return stored if stored.dtype.itemsize > 1 else stored.float()
