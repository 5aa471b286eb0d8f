"""The taps of a site on the CPU, row by row in torch, from the tables of the kernel."""

from __future__ import annotations

import torch

from executor.graphs.limits import RECORD
from executor.graphs.operations import Code
from executor.graphs.tables import Tables


def run_taps(tables: Tables, site: int, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
    """Run the open taps of a site on the rows of a step.

    Args:
        tables: of the step.
        site: its number.
        first: the site's tensor, [rows, columns], changed in place.
        second: of a residual pair, the other tensor. A changed row becomes (0, value), as `executor.views.view.Stream` writes it.
    """
    heads = 2 * len(tables.widths)
    for row in range(first.shape[0]):
        slot, at = tables.rows[row].tolist()
        record = tables.records[slot]
        begin, count = record[2 * site : 2 * site + 2].tolist()
        if not count:
            continue
        before = first[row] if second is None else first[row] + second[row]
        x = before.clone()
        taps = record[heads:].view(-1, RECORD)
        wrote = False
        for k in range(begin, begin + count):
            wrote |= _run(tables, [*taps[k, :8].tolist(), int(taps[k, 15])], taps[k].view(torch.float32)[8:], at, x)
        if second is None:
            first[row] = x
        elif wrote and bool((before != x).any()):
            first[row] = 0
            second[row] = x


def _run(tables: Tables, tap: list[int], numbers: torch.Tensor, at: int, row: torch.Tensor) -> bool:
    """Run one tap on one row, [columns]; return whether it is a write that applies to the row.

    `numbers` are the tap's float32 parameters, [8].
    """
    code, start, stop, first, after, vector, stride, last, wide_vector = tap
    if not first <= at < after:
        return False
    x = row[start:stop]
    width = stop - start
    if code == Code.READ:
        offset = last + (at - first) * width
        tables.output[offset : offset + width] = x
        return False
    wide = x.float()
    number, c0, c1, c2, c3, low, high = numbers[:7]
    operand = number.expand(width)
    if vector >= 0:
        size = 2 if wide_vector else 1
        offset = vector + (at - first) * stride * size
        held = tables.bank.values[offset : offset + width * size]
        operand = held.view(torch.float32) if wide_vector else held.float()
    if code == Code.ADD:
        made = wide + operand
    elif code == Code.MULTIPLY:
        made = wide * operand
    elif code == Code.SET:
        made = operand
    elif code == Code.CLAMP:
        made = wide.clamp(low, high)
    else:
        factor = c0
        if c1 != 0:
            factor = factor + c1 * (wide * wide).sum().sqrt()
        if c2 != 0 or c3 != 0:
            product = (wide * tables.bank.values[last : last + width].float()).sum()
            factor = factor + c2 * product + c3 * (product.clamp(low, high) - product)
        made = wide + factor * operand
    row[start:stop] = made.to(row.dtype)
    return True
