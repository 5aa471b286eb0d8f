"""Which tensors of a batch have the rows of its requests."""

from __future__ import annotations

import pytest
import torch

from executor.model.rows import Rows


@pytest.mark.parametrize(
    ("shape", "dtype", "plain", "axes"),
    [
        ((3, 16), torch.float32, True, True),  # hidden states of three rows
        ((3, 3), torch.float32, True, True),
        ((3, 3), torch.int64, True, False),  # three positions for each of three rows
        ((3,), torch.int64, True, True),  # token ids
        ((3, 8), torch.int64, False, False),  # three positions for each of eight rows, padding included
        ((8, 4, 16), torch.float32, True, True),
        ((5, 16), torch.float32, False, False),
    ],
)
def test_positions_with_axes_are_no_rows(shape: tuple[int, ...], dtype: torch.dtype, plain: bool, axes: bool) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    rows = 3 if shape[0] == 3 and (len(shape) == 1 or shape[1] != 8) else 6
    assert Rows(0, 1, rows, 8).holds(tensor) is plain
    assert Rows(0, 1, rows, 8, axes=True).holds(tensor) is axes
