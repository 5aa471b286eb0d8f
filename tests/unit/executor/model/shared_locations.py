"""Locations that several blocks are served at once, without an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from executor.core.location import Kind, Location
from executor.model.batched import BatchValue, Member, settle
from executor.model.layouts import WHOLE
from executor.model.rows import BatchRows, Rows

WIDTH = 4
AT = Location("layer", Kind.OUTPUT, 1)
SPANS = {
    "side by side": [(0, 1), (1, 2), (2, 3)],
    "prompts": [(0, 3), (3, 5), (5, 6)],
    "with gaps": [(1, 2), (3, 5), (6, 7)],
    "in another order": [(4, 5), (0, 2), (2, 3)],
    "far apart": [(0, 1), (20, 21), (39, 40)],
}

Pair = tuple[torch.Tensor, torch.Tensor]


def pair(total: int = 40, device: str = "cpu") -> Pair:  # [total, width] each
    """Return what a layer gives for so many rows."""
    with torch.inference_mode():
        numbers = torch.arange(total * WIDTH, dtype=torch.float32, device=device).view(total, WIDTH)
        return numbers.clone(), -numbers


def served(value: Any, spans: list[tuple[int, int]]) -> list[Member]:
    """Serve blocks with these rows at once."""
    total = next(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)).shape[0]
    rows = BatchRows.of([Rows(start, stop, total, total) for start, stop in spans])
    shared = BatchValue(value, rows, lambda path: WHOLE)
    return [Member(shared, index, AT) for index in range(len(spans))]


def leave(members: list[Member], current: Any) -> Any:
    """Settle members as the interleaver does; return what the model goes on with."""
    with torch.inference_mode():
        plain = [member for member in members if member.plain]
        settle(plain, current)
        for member in members:
            if member not in plain:
                current = member.settle(current)
    for member in members:
        member.leave()
    return current
