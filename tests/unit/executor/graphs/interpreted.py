"""Compares the Triton kernel with the reference in Triton's interpreter, which a process chooses before it imports Triton.

The interpreter does not round to bfloat16; `tests/gpu/test_taps.py` compares that on a GPU.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator

import torch

from executor.graphs import kernel, reference
from tests.unit.executor.graphs.samples import CPU, numbers, same, sample

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


def run_both(seed: int, dtype: torch.dtype, pair: bool, form: bool, device: torch.device = CPU) -> Pairs:
    """Yield each tensor that the kernel changes or writes, beside the reference's."""
    rng = random.Random(seed)
    mine, other = sample(seed, dtype, device, form=form), sample(seed, dtype, form=form)
    for site, width in enumerate(mine.tables.widths):
        values = [numbers(rng, mine.padded, width + 3, dtype=dtype, special=not form) for _ in range(2 if pair else 1)]
        got = [one.to(device, copy=True)[:, :width] for one in values]
        expected = [one.clone()[:, :width] for one in values]
        kernel.run_taps(mine.tables, site, *got)
        reference.run_taps(other.tables, site, *expected)
        yield from ((one.cpu(), two) for one, two in zip(got, expected, strict=True))
    yield mine.tables.output.cpu(), other.tables.output


def exact(seeds: int) -> None:
    for seed in range(seeds):
        for dtype in (torch.float32, torch.float16):
            for pair in (False, True):
                for got, expected in run_both(seed, dtype, pair, form=False):
                    assert same(got, expected), (seed, dtype, pair)


def forms(seeds: int) -> None:
    for seed in range(seeds):
        for pair in (False, True):
            for got, expected in run_both(seed, torch.float32, pair, form=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def pieces(seed: int) -> None:
    """Rows that do not lie in one piece get the same."""
    rng = random.Random(seed)
    mine, other = sample(seed, torch.float32), sample(seed, torch.float32)
    for site, width in enumerate(mine.tables.widths):
        values = numbers(rng, mine.padded, width, dtype=torch.float32)
        got, expected = values.t().contiguous().t(), values.clone()
        assert got.stride(-1) != 1 or width == 1
        kernel.run_taps(mine.tables, site, got)
        reference.run_taps(other.tables, site, expected)
        assert same(got, expected)
    assert same(mine.tables.output, other.tables.output)


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, which the interpreter computes with
    {"exact": exact, "forms": forms, "pieces": pieces}[sys.argv[1]](int(sys.argv[2]))
    print("compared")
