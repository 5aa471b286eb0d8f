"""Constants are shared where all of their bits are equal, and only there."""

from __future__ import annotations

import pytest
import torch

from executor.graphs.constants import Constants


def test_equal_contents_are_one_constant() -> None:
    constants = Constants()
    x = torch.randn(5, 7)
    made = constants.add(x)
    assert constants.find(x.clone()) is made and made.size == 140 == constants.used
    x[0, 0] += 1
    assert constants.find(x) is None  # the copy is the constants' own


def test_sums_alone_do_not_make_constants_equal() -> None:
    constants = Constants()
    x = torch.randn(6)
    constants.add(x)
    assert constants.find(x.flip(0)) is None


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 3), torch.zeros(3, 2).to(torch.int32), torch.zeros(2, 3).t(), -torch.zeros(3, 2)]
)
def test_another_form_or_another_bit_is_another_constant(other: torch.Tensor) -> None:
    constants = Constants()
    constants.add(torch.zeros(3, 2))
    assert constants.find(other) is None


def test_the_layout_stays_and_nothing_is_repeated() -> None:
    constants = Constants()
    x = torch.randn(4, 6).t()
    assert constants.add(x).tensor.stride() == x.stride()
    repeated = torch.randn(1, 3).expand(4, 3)
    made = constants.add(repeated)
    assert made.tensor.stride() == (3, 1) and torch.equal(made.tensor, repeated)
    assert constants.find(repeated) is made


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_is_compared_by_its_bits(dtype: torch.dtype) -> None:
    constants = Constants()
    x = torch.tensor([0.0, 1.0, float("nan")]).to(dtype)
    made = constants.add(x)
    assert constants.find(x.clone()) is made
    assert constants.find(x.clone().fill_(1)) is None


def test_the_last_user_frees_a_constant() -> None:
    constants = Constants()
    made = constants.add(torch.ones(3))
    made.users = 2
    constants.drop(made)
    assert constants.find(torch.ones(3)) is made
    constants.drop(made)
    assert constants.find(torch.ones(3)) is None and constants.used == 0
    assert constants.add(torch.ones(3)).number != made.number
