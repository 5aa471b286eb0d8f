"""The Triton kernel against the reference, on the same tables; Triton's interpreter runs the kernel on the CPU.

The interpreter does not round to bfloat16; `tests/gpu/test_taps.py` compares that on a GPU.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from executor.graphs import reference
from tests.unit.executor.graphs.samples import numbers, sample
from tests.unit.executor.graphs.test_reference import same

# numpy's, which the interpreter computes with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    name = "executor.graphs.kernel"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        sys.modules.pop(name, None)
        yield importlib.import_module(name)
    sys.modules.pop(name)


def run_both(
    kernel: ModuleType, seed: int, dtype: torch.dtype, pair: bool, form: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor that the kernel changes or writes, beside the reference's."""
    rng = random.Random(seed)
    mine, other = sample(seed, dtype, form=form), sample(seed, dtype, form=form)
    for site, width in enumerate(mine.tables.widths):
        values = [numbers(rng, mine.padded, width + 3, dtype=dtype, special=not form) for _ in range(2 if pair else 1)]
        got = [one.clone()[:, :width] for one in values]
        expected = [one.clone()[:, :width] for one in values]
        kernel.run_taps(mine.tables, site, *got)
        reference.run_taps(other.tables, site, *expected)
        yield from zip(got, expected, strict=True)
    yield mine.tables.output, other.tables.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_elementwise_operations_have_the_same_bits(
    kernel: ModuleType, seed: int, dtype: torch.dtype, pair: bool
) -> None:
    for got, expected in run_both(kernel, seed, dtype, pair, form=False):
        assert same(got, expected)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_forms_agree_within_the_rounding_of_a_sum(kernel: ModuleType, seed: int, pair: bool) -> None:
    for got, expected in run_both(kernel, seed, torch.float32, pair, form=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_rows_in_pieces_are_refused(kernel: ModuleType) -> None:
    made = sample(1, torch.float32)
    with pytest.raises(ValueError, match="one piece"):
        kernel.run_taps(made.tables, 0, torch.zeros(12, made.padded).t())
