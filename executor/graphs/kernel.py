"""The taps of a site in one Triton kernel: one program for each row reads the tables.

A row without an open tap costs four loads. The kernel is compiled for each dtype, width and kind of site by `compile_all`, at
start: a first compilation takes half a second, which no step may wait for. Imported where there is a CUDA device.

Fused multiply-adds are off, because `operations` rounds after each operation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from executor.graphs.limits import RECORD
from executor.graphs.operations import Code
from executor.graphs.tables import Tables

_READ = tl.constexpr(int(Code.READ))
_ADD = tl.constexpr(int(Code.ADD))
_MULTIPLY = tl.constexpr(int(Code.MULTIPLY))
_SET = tl.constexpr(int(Code.SET))
_CLAMP = tl.constexpr(int(Code.CLAMP))
_FORM = tl.constexpr(int(Code.FORM))
_RECORD = tl.constexpr(RECORD)
_PROGRAMS, _APPENDED = 64, 2048  # programs that append, and the elements that each takes at a time


@triton.jit(do_not_specialize=["length", "heads", "site"])
def _tap_rows(  # type: ignore[no-untyped-def]
    first_ptr,
    second_ptr,
    out_ptr,
    bank_ptr,
    wide_ptr,
    rows_ptr,
    ints_ptr,
    floats_ptr,
    length,
    heads,
    site,
    width,
    first_stride,
    second_stride,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    record = tl.load(rows_ptr + row * 2).to(tl.int64) * length
    count = tl.load(ints_ptr + record + site * 2 + 1)
    if count > 0:
        at = tl.load(rows_ptr + row * 2 + 1)
        taps = record + heads + tl.load(ints_ptr + record + site * 2) * _RECORD
        dtype = first_ptr.dtype.element_ty
        columns = tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(first_ptr + row * first_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if PAIR:
            other = tl.load(second_ptr + row * second_stride + columns, mask=inside, other=0.0).to(tl.float32)
            x = (x + other).to(dtype).to(tl.float32)
        before = x
        touched = columns < 0
        wrote = 0
        for k in range(count):
            tap = taps + k * _RECORD
            begin = tl.load(ints_ptr + tap + 3)
            after = tl.load(ints_ptr + tap + 4)
            if (at >= begin) & (at < after):
                code = tl.load(ints_ptr + tap)
                start = tl.load(ints_ptr + tap + 1)
                stop = tl.load(ints_ptr + tap + 2)
                vector = tl.load(ints_ptr + tap + 5)
                stride = tl.load(ints_ptr + tap + 6)
                last = tl.load(ints_ptr + tap + 7)
                mine = (columns >= start) & (columns < stop)
                if code == _READ:
                    target = out_ptr + last + (at - begin).to(tl.int64) * (stop - start)
                    tl.store(target + (columns - start), x.to(dtype), mask=mine)
                else:
                    number = tl.load(floats_ptr + tap + 8)
                    low = tl.load(floats_ptr + tap + 13)
                    high = tl.load(floats_ptr + tap + 14)
                    operand = tl.zeros([BLOCK], tl.float32) + number
                    if vector >= 0:
                        skipped = (at - begin).to(tl.int64) * stride
                        if tl.load(ints_ptr + tap + 15) != 0:
                            wide = wide_ptr + vector // 2 + skipped
                            operand = tl.load(wide + (columns - start), mask=mine, other=0.0)
                        else:
                            source = bank_ptr + vector + skipped
                            operand = tl.load(source + (columns - start), mask=mine, other=0.0).to(tl.float32)
                    made = operand
                    if code == _ADD:
                        made = x + operand
                    if code == _MULTIPLY:
                        made = x * operand
                    if code == _CLAMP:
                        made = tl.where(x < low, low, x)
                        made = tl.where(made > high, high, made)
                    if code == _FORM:
                        c0 = tl.load(floats_ptr + tap + 9)
                        c1 = tl.load(floats_ptr + tap + 10)
                        c2 = tl.load(floats_ptr + tap + 11)
                        c3 = tl.load(floats_ptr + tap + 12)
                        factor = c0
                        if c1 != 0:
                            factor += c1 * tl.sqrt_rn(tl.sum(tl.where(mine, x * x, 0.0), axis=0))
                        if (c2 != 0) | (c3 != 0):
                            along = tl.load(bank_ptr + last + (columns - start), mask=mine, other=0.0).to(tl.float32)
                            product = tl.sum(tl.where(mine, x * along, 0.0), axis=0)
                            kept = tl.where(product < low, low, product)
                            kept = tl.where(kept > high, high, kept)
                            factor += c2 * product + c3 * (kept - product)
                        made = x + factor * operand
                    x = tl.where(mine, made.to(dtype).to(tl.float32), x)
                    touched = touched | mine
                    wrote = 1
        if PAIR:
            changed = tl.max((inside & (x != before)).to(tl.int32), axis=0)
            written = columns < width * changed * wrote
            tl.store(first_ptr + row * first_stride + columns, tl.zeros([BLOCK], dtype), mask=written)
            tl.store(second_ptr + row * second_stride + columns, x.to(dtype), mask=written)
        else:
            tl.store(first_ptr + row * first_stride + columns, x.to(dtype), mask=touched)


def run_taps(tables: Tables, site: int, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
    """Launch the taps of a site on the rows of a step; the launch can be captured.

    The result is that of `executor.graphs.reference.run_taps`.

    Args:
        first, second: [rows, columns] on the device of the tables.
    """
    width = tables.widths[site]
    if first.stride(-1) != 1 or (second is not None and second.stride(-1) != 1):
        pieces = [one.contiguous() for one in (first, second) if one is not None]
        run_taps(tables, site, *pieces)
        for one, piece in zip((first, second), pieces, strict=False):
            if one is not None:
                one.copy_(piece)
        return
    block = triton.next_power_of_2(width)
    launch: Any = _tap_rows[(first.shape[0],)]
    launch(
        first,
        first if second is None else second,
        tables.output,
        tables.bank.values,
        tables.bank.values.view(torch.float32),
        tables.rows,
        tables.records,
        tables.records.view(torch.float32),
        tables.length,
        2 * len(tables.widths),
        site,
        width,
        first.stride(0),
        0 if second is None else second.stride(0),
        PAIR=second is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        enable_fp_fusion=False,
    )


@triton.jit
def _append_used(  # type: ignore[no-untyped-def]
    output_ptr,
    ring_ptr,
    state_ptr,
    done_ptr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    base = tl.load(state_ptr)
    top = tl.load(state_ptr + 1)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < top:
        at = start + tl.arange(0, BLOCK)
        values = tl.load(output_ptr + at, mask=at < top)
        tl.store(ring_ptr + base + at, values, mask=at < top)
        start += PROGRAMS * BLOCK
    # The last program moves on: every other program has read where this step goes.
    if tl.atomic_add(done_ptr, 1) == PROGRAMS - 1:
        tl.store(state_ptr, base + top)
        tl.store(done_ptr, 0)


_done: dict[torch.device, torch.Tensor] = {}


def append(output: torch.Tensor, ring: torch.Tensor, state: torch.Tensor) -> None:
    """Launch what appends the used part of an output to a ring; the launch can be captured.

    The result is that of `executor.graphs.ring.append`.

    Args:
        output: [elements of a step].
        ring: [elements].
        state: [2], int64.
    """
    if ring.device not in _done:
        _done[ring.device] = torch.zeros(1, dtype=torch.int32, device=ring.device)
    launch: Any = _append_used[(_PROGRAMS,)]
    launch(output, ring, state, _done[ring.device], PROGRAMS=_PROGRAMS, BLOCK=_APPENDED)


def compile_all(tables: Tables, pairs: frozenset[int]) -> None:
    """Compile the kernel for every width of a site, on rows of padding.

    `pairs` are the sites of residual pairs.
    """
    device, dtype = tables.output.device, tables.output.dtype
    append(tables.output, torch.zeros(1, dtype=dtype, device=device), torch.zeros(2, dtype=torch.int64, device=device))
    done: set[tuple[int, bool]] = set()
    for site, width in enumerate(tables.widths):
        if (width, site in pairs) in done:
            continue
        done.add((width, site in pairs))
        values = torch.zeros(1, width, dtype=dtype, device=device)
        run_taps(tables, site, values, torch.zeros_like(values) if site in pairs else None)
