"""Keeps numbers that are not finite out of the cache blocks that requests reuse.

The engine never clears a cache block. Attention kernels read whole blocks, and give the slots behind a request's own keys and
values a probability of zero. Zero times NaN is NaN, so a NaN that one request left there would reach the numbers of the next.

The numbers of plain requests are finite. A block can make any number. So the guard checks what a request added to the cache in
a step in which its block changed something. It does so when the model has run, before another request can read the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from vllm.forward_context import get_forward_context

from executor.core.request import Span
from executor.model.kv_caches import GuardedCache, is_plain

# Addresses of slots change with the engine's buffers only, which are few.
_MOST_TABLES = 64


class _Ticket(Protocol):
    def query(self) -> bool:
        """Return whether the copy is over."""

    def synchronize(self) -> None:
        """Wait until it is over."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True)
class _Watched:
    """Flags on their way to the host.

    Attributes:
        flags: on the host, [owners]; not to be read before the copy is over.
        keys: the blocks of each flag.
        copied: the copy.
    """

    flags: torch.Tensor
    keys: Sequence[Collection[str]]
    copied: _Ticket


class CacheGuard:
    """Checks the caches of one worker's attention layers.

    The check is work of the device, in the order of its stream: so the cache is clean before another request reads it, and
    nothing waits. A flag says which blocks' requests had to be cleaned. The host reads it when its copy has come, which is a
    step or two later. On a CPU it has come at once.

    Args:
        layers: the model's layers by name, as the engine keeps them. Layers without a cache are passed over.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        self._layers = layers
        self._caches: list[GuardedCache] = []
        self._tables: dict[tuple[int, ...], Any] = {}  # of the kernel, by the addresses of the slots
        self._watched: deque[_Watched] = deque()
        self._spoilt: set[str] = set()

    @cached_property
    def why_not_looked_at(self) -> str:
        """Return why the cache cannot be checked, so that blocks may only read; "" if it can.

        A model may choose the format of its cache itself, after the engine's configuration was checked. The format is known
        when the cache is allocated.
        """
        for name, layer in self._layers.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.dim() >= 3 and not is_plain(layer, cache):
                kind = str(getattr(layer, "kv_cache_dtype", "")) or str(cache.dtype).removeprefix("torch.")
                return (
                    f"{name} keeps its keys packed ({kind}), and what is not finite among packed keys could not be kept from "
                    "other requests; the logits and the samples can be changed, all else can be read"
                )
        return ""

    # What is checked, and where.

    @property
    def caches(self) -> list[GuardedCache]:
        """The caches that are checked."""
        if not self._caches or any(one.layer.kv_cache is not one.cache for one in self._caches):
            found = [GuardedCache.of(name, layer) for name, layer in self._layers.items()]
            self._caches = [one for one in found if one is not None]
            self._tables.clear()
        return self._caches

    @property
    def capturable(self) -> bool:
        """Whether `launch` can be captured in a graph: the kernel takes all caches."""
        return all(one.cache.is_cuda and one.parts is not None for one in self.caches)

    def prepare(self, mapping: Mapping[str, torch.Tensor]) -> None:
        """Make what `launch` needs for such slots, before a capture; compiles the kernel.

        Args:
            mapping: the slots by the layer's name, [rows] each, as of `launch`.
        """
        device = self.caches[0].cache.device if self.caches else torch.device("cpu")
        nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
        self.launch(mapping, nobody, torch.zeros_like(nobody))

    def launch(self, mapping: Mapping[str, torch.Tensor], owners: torch.Tensor, flags: torch.Tensor) -> None:
        """Zero the cache blocks that are not sound, and raise the flags of their requests.

        A number is sound if it is not NaN and not too large. Only blocks of the cache that rows with an owner added to are looked
        at; no two requests add to the same one. On CUDA it is one launch of a kernel for all layers, waits for nothing and
        allocates nothing, if `prepare` saw slots at the same addresses before.

        Args:
            mapping: for each layer by name, the slot in the cache that each row's keys and values went to, [rows or more]; a
                negative slot is none.
            owners: int32 [rows], the index of the row's flag; negative: the row is not looked at.
            flags: int32 [owners]; a flag becomes 1 and is never lowered.
        """
        caches = self.caches
        by_kernel = [one for one in caches if one.cache.is_cuda and one.parts is not None]
        for one in caches:
            if not (one.cache.is_cuda and one.parts is not None):
                one.clean(mapping[one.name][: len(owners)].to(one.cache.device), owners, flags)
        if by_kernel:
            from executor.model.kv_kernel import CacheTable, clean

            key = tuple(mapping[one.name].data_ptr() for one in by_kernel)
            if key not in self._tables:
                if len(self._tables) >= _MOST_TABLES:
                    self._tables.clear()
                self._tables[key] = CacheTable.several(by_kernel, mapping)
            for table in self._tables[key]:
                clean(table, owners, flags)

    def launch_here(self, owners: torch.Tensor, flags: torch.Tensor) -> None:
        """Do what `launch` does in the model's forward context, which knows the slots.

        Where it does not know them, all flags are raised.

        Args:
            owners: int32 [rows], as of `launch`.
            flags: int32 [owners], as of `launch`.
        """
        context = get_forward_context()
        if context.attn_metadata is None or not self.caches:
            return
        mapping = context.slot_mapping if isinstance(context.slot_mapping, dict) else {}
        if any(one.name not in mapping for one in self.caches):
            flags.fill_(1)
        else:
            self.launch(mapping, owners, flags)

    # What was found.

    def watch(self, flags: torch.Tensor, keys: Sequence[Collection[str]]) -> None:
        """Have the flags of a launch copied to the host.

        Args:
            flags: [owners], of `launch`; they may be lowered for the next launch in the order of the stream.
            keys: the blocks of each flag.
        """
        self._take_over()
        if not flags.is_cuda:
            self._watched.append(_Watched(flags.clone(), keys, _Done()))
            return
        host = torch.empty(len(keys), dtype=flags.dtype, pin_memory=True)
        host.copy_(flags[: len(keys)], non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._watched.append(_Watched(host, keys, event))

    def check(self, spans: Mapping[str, Iterable[Span]]) -> None:
        """Look at the cache blocks that requests added to in the step.

        Called when the model has run, in its forward context, which says for each layer and token where its keys and values
        went, whatever the attention's backend.

        Args:
            spans: the rows of each block, as they are in the batch.
        """
        context = get_forward_context()
        caches = self.caches
        if context.attn_metadata is None or not caches:
            return
        mapping = context.slot_mapping if isinstance(context.slot_mapping, dict) else {}
        if any(one.name not in mapping for one in caches):
            self._spoilt.update(spans)  # nobody can tell what is in it
            return
        keys: dict[Span, list[str]] = {}
        for key, some in spans.items():
            for span in some:
                keys.setdefault(span, []).append(key)
        owners = torch.full((max((span.stop for span in keys), default=0),), -1, dtype=torch.int32)
        for number, span in enumerate(keys):
            owners[span.start : span.stop] = number
        device = caches[0].cache.device
        if device.type == "cuda":
            owners = owners.pin_memory().to(device, non_blocking=True)
        flags = torch.zeros(len(keys), dtype=torch.int32, device=device)
        self.launch(mapping, owners, flags)
        self.watch(flags, list(keys.values()))

    def poll(self) -> frozenset[str]:
        """Return the blocks that spoilt the cache and whose flags have come, each once."""
        self._take_over()
        found = frozenset(self._spoilt)
        self._spoilt.clear()
        return found

    def wait(self, keys: Collection[str]) -> frozenset[str]:
        """Wait for the flags of some blocks; return the blocks that spoilt the cache.

        A block that was returned before is left out.
        """
        last = max(
            (i for i, one in enumerate(self._watched) if any(set(keys) & set(some) for some in one.keys)), default=-1
        )
        for _ in range(last + 1):
            self._watched[0].copied.synchronize()
            self._take()
        found = frozenset(self._spoilt & set(keys))
        self._spoilt -= found
        return found

    def _take_over(self) -> None:
        """Take the flags that have come."""
        while self._watched and self._watched[0].copied.query():
            self._take()

    def _take(self) -> None:
        watched = self._watched.popleft()
        for flag, keys in zip(watched.flags.tolist(), watched.keys, strict=True):
            if flag:
                self._spoilt.update(keys)
