"""Sums of recorded tensors are found where few columns are thousands of times as large as the others."""

from __future__ import annotations

import torch

from executor.views.probe import multiple, weights


def drawn(seed: int, large: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a stream with three large columns, and what a part adds to it: [rows, width] both."""
    noise = torch.Generator().manual_seed(seed)
    stream, added = (torch.randn(12, 256, generator=noise) for _ in range(2))
    stream[:, [7, 90, 201]] += large
    return stream.to(dtype), added.to(dtype)


def test_a_factor_is_found_beside_large_columns() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for seed in range(20):
            stream, added = drawn(seed, 30_000.0, dtype)
            assert multiple(stream + added, added, stream) == 1.0, (dtype, seed)
            scaled = multiple(stream + added * 0.25, added, stream)
            assert scaled is not None and abs(scaled - 0.25) < 0.01, (dtype, seed, scaled)
            found = weights(stream * 1.0 + added * 0.5, [stream, added])
            assert found is not None and abs(found[0] - 1) < 0.01 and abs(found[1] - 0.5) < 0.01, (dtype, seed, found)


def test_what_is_no_sum_is_none() -> None:
    for seed in range(20):
        stream, added = drawn(seed, 30_000.0, torch.bfloat16)
        other = drawn(seed + 100, 0.0, torch.bfloat16)[1]
        assert multiple(stream + added, other, stream) is None
        assert weights(stream + added, [stream, other]) is None
