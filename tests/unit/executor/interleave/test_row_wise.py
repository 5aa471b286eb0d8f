"""Which operations keep the rows of a prompt apart, as far as shapes say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from executor.interleave.row_wise import RowWise
from executor.model.meta_tensors import Fakes

ROWS, WIDTH = 12, 8
APART: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda h: h.add_(1),
    "columns": lambda h: h[:, 2:4].mul_(2),
    "one row": lambda h: h[3].copy_(torch.zeros(WIDTH)),
    "a row by itself": lambda h: h[3].copy_(h[3].softmax(-1)),
    "rows": lambda h: h[2:5].mul_(h[2:5]),
    "heads": lambda h: h.view(ROWS, 2, 4)[:, 1].zero_(),
    "norms": lambda h: h.div_(h.norm(dim=-1, keepdim=True)),
    "product": lambda h: h.copy_(h @ torch.zeros(WIDTH, WIDTH)),
    "vector": lambda h: h.sub_((h @ torch.zeros(WIDTH))[:, None] * torch.zeros(WIDTH)),
    "parts": lambda h: h.copy_(torch.cat([h[:, :4], h[:, 4:]], dim=1)),
    "mask": lambda h: h.masked_fill_(torch.arange(ROWS)[:, None] == 3, 0),
    "index": lambda h: h.index_put_((torch.tensor([1, 5]),), torch.zeros(WIDTH)),
    "top": lambda h: h.copy_(h.topk(WIDTH, dim=-1).values),
}
MIXED: dict[str, Callable[[torch.Tensor], object]] = {
    "mean": lambda h: h.add_(h.mean(0)),
    "all": lambda h: h.add_(h.sum()),
    "flip": lambda h: h.copy_(h.flip(0)),
    "transposed": lambda h: h.copy_(h.t().reshape(ROWS, WIDTH)),
    "row to row": lambda h: h[3].copy_(h[5]),
    "slice to slice": lambda h: h[1:].copy_(h[:-1].clone()),
    "row to all": lambda h: h.add_(h[0].clone()),
    "broadcast": lambda h: h.add_((h[:, 0] + torch.zeros(ROWS, 1)).sum(1, keepdim=True)),
    "attention": lambda h: h.copy_((h @ h.t()).softmax(-1) @ h),
    "weights of rows": lambda h: h.copy_(torch.zeros(ROWS, ROWS) @ h),
    "running sum": lambda h: h.cumsum_(0),
    "sorted": lambda h: h.copy_(h.sort(0).values),
    "index of rows": lambda h: h.copy_(h[torch.arange(ROWS).flip(0)]),
    "reshaped": lambda h: h.copy_(h.reshape(WIDTH, ROWS).t().clone()),
    "rolled": lambda h: h.copy_(h.roll(1, 0)),
    "stacked first": lambda h: h.copy_(torch.stack([h, h]).view(ROWS, 2 * WIDTH)[:, :WIDTH]),
    "square": lambda h: h.copy_(h[None].expand(ROWS, ROWS, WIDTH).sum(1)),
}


def through_a_buffer(h: torch.Tensor) -> object:  # [rows, width]
    """Move rows through a tensor of the block's own."""
    buffer = torch.zeros(ROWS, WIDTH)
    buffer[1:] = h[:-1]
    return h.add_(buffer)


def after_a_view(h: torch.Tensor) -> object:  # [rows, width]
    """Mix a view of the rows first."""
    h[:, :4].add_(h[:, :4].mean(0))
    return h


def followed(change: Callable[[torch.Tensor], object]) -> str:
    fakes, rows = Fakes(), RowWise()
    h = fakes.make((ROWS, WIDTH), torch.float32, torch.device("cpu"))
    rows.note(h)
    with torch.no_grad(), rows:
        change(h)
    return rows.why_mixed(h)


@pytest.mark.parametrize("name", APART)
def test_rows_stay_apart(name: str) -> None:
    assert followed(APART[name]) == ""


@pytest.mark.parametrize("name", MIXED)
def test_rows_are_mixed(name: str) -> None:
    assert followed(MIXED[name])


@pytest.mark.parametrize("change", [through_a_buffer, after_a_view])
def test_rows_are_mixed_by_a_detour(change: Callable[[torch.Tensor], object]) -> None:
    assert followed(change)


@pytest.mark.parametrize("name", [*APART, *MIXED])
def test_what_is_said_to_keep_rows_apart_does(name: str) -> None:
    """With other numbers in other rows, a row that is apart comes out the same."""
    change = {**APART, **MIXED}[name]
    one = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    other = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    for row in range(ROWS):
        mine, changed = one.clone(), other.clone()
        changed[row] = one[row]
        change(mine)
        change(changed)
        if not torch.allclose(mine[row], changed[row], atol=1e-6):
            assert followed(change), f"row {row} depends on others"
