"""The check of all layers' caches in one Triton kernel: a program for each layer and row.

The first row of an owner in a cache block looks at that block; the others of this block do nothing. A layer is an entry of a
table on the device, so one launch serves all layers. Imported where there is a CUDA device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from executor.model.kv_caches import GuardedCache, largest

_FIELDS = tl.constexpr(7)
_ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.uint8,
    torch.float8_e5m2: tl.uint8,
}
# The exponent and fraction bits from which on a number of eight bits is not finite.
_FIRST_UNSOUND = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
_BLOCK = 8192


@dataclass(frozen=True)
class CacheTable:
    """Caches of one dtype.

    Attributes:
        fields: int64 [layers, 7], on the device: the addresses of the cache and of the slots, the slots of a block, and `Parts`.
        kind: the dtype of the numbers.
        slots: the dtype of the slots.
        longest: the elements of the longest piece.
    """

    fields: torch.Tensor
    kind: torch.dtype
    slots: torch.dtype
    longest: int

    @classmethod
    def several(cls, caches: Sequence[GuardedCache], mapping: Mapping[str, torch.Tensor]) -> list[CacheTable]:
        """Return tables for all caches.

        Args:
            caches: of which each has parts.
            mapping: the slots by the layer's name, [rows] each.
        """
        groups: dict[tuple[torch.dtype, torch.dtype], list[GuardedCache]] = {}
        for cache in caches:
            groups.setdefault((cache.kind, mapping[cache.name].dtype), []).append(cache)
        return [cls._of(group, kind, slots, mapping) for (kind, slots), group in groups.items()]

    @classmethod
    def _of(
        cls,
        caches: Sequence[GuardedCache],
        kind: torch.dtype,
        slots: torch.dtype,
        mapping: Mapping[str, torch.Tensor],  # [rows] each
    ) -> CacheTable:
        fields, longest = [], 1
        for one in caches:
            parts, slots_of = one.parts, mapping[one.name]
            if parts is None or slots_of.stride(0) != 1:
                raise ValueError(f"the cache or the slots of {one.name} do not lie in one piece")
            longest = max(longest, parts.length)
            sizes = (parts.block, parts.count, parts.stride, parts.length)
            fields.append([one.cache.data_ptr(), slots_of.data_ptr(), one.slots, *sizes])
        made = torch.tensor(fields, dtype=torch.int64)
        return cls(made.to(caches[0].cache.device), kind, slots, longest)


@triton.jit
def _clean(  # type: ignore[no-untyped-def]
    fields_ptr,
    owners_ptr,
    flags_ptr,
    largest,
    first_unsound,
    ELEMENT: tl.constexpr,
    SLOT: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    fields = fields_ptr + tl.program_id(1) * _FIELDS
    owner = tl.load(owners_ptr + row)
    if owner >= 0:
        slots_ptr = tl.load(fields + 1).to(tl.pointer_type(SLOT))
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot >= 0:
            size = tl.load(fields + 2)
            block = slot // size
            before = tl.load(slots_ptr + row - 1, mask=row > 0, other=-1).to(tl.int64)
            owner_before = tl.load(owners_ptr + row - 1, mask=row > 0, other=-1)
            seen = (owner_before == owner) & (before >= 0) & (before // size == block)
            if seen == 0:
                start = tl.load(fields).to(tl.pointer_type(ELEMENT)) + block * tl.load(fields + 3)
                count = tl.load(fields + 4)
                stride = tl.load(fields + 5)
                length = tl.load(fields + 6)
                columns = tl.arange(0, BLOCK)
                unsound = 0
                for part in range(count):
                    for at in range(0, length, BLOCK):
                        inside = at + columns < length
                        x = tl.load(start + part * stride + at + columns, mask=inside, other=0)
                        if BYTES:
                            bad = (x & 0x7F) >= first_unsound
                        else:
                            bad = (tl.abs(x.to(tl.float32)) <= largest) == 0  # NaN is not
                        unsound = tl.maximum(unsound, tl.max((bad & inside).to(tl.int32), axis=0))
                if unsound > 0:
                    for part in range(count):
                        for at in range(0, length, BLOCK):
                            target = start + part * stride + at + columns
                            tl.store(target, tl.zeros([BLOCK], ELEMENT), mask=at + columns < length)
                    tl.store(flags_ptr + owner, 1)


def clean(table: CacheTable, owners: torch.Tensor, flags: torch.Tensor) -> None:
    """Launch the check of a table's caches; it can be captured.

    Args:
        table: the caches.
        owners, flags: as of `CacheGuard.launch`: int32 [rows] and int32 [owners], on the device of the caches.
    """
    if not len(owners):
        return
    block = min(_BLOCK, triton.next_power_of_2(table.longest))
    launch: Any = _clean[(len(owners), len(table.fields))]
    launch(
        table.fields,
        owners,
        flags,
        largest(table.kind),
        _FIRST_UNSOUND.get(table.kind, 0),
        ELEMENT=_ELEMENTS[table.kind],
        SLOT=tl.int32 if table.slots == torch.int32 else tl.int64,
        BYTES=table.kind in _FIRST_UNSOUND,
        BLOCK=block,
        num_warps=max(1, min(8, block // 1024)),
    )
