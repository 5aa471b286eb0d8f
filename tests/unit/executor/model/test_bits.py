"""Digests of large tensors are taken in parts, and see each element and where it is."""

from __future__ import annotations

import pytest
import torch

from executor.model.bits import digests

LARGE = (1 << 20) + 3


@pytest.mark.parametrize("at", [0, 7, (1 << 20) - 1, 1 << 20, LARGE - 1])
def test_one_element_more_or_less_is_seen(at: int) -> None:
    values = torch.arange(LARGE, dtype=torch.float32)
    changed = values.clone()
    changed[at] += 1
    assert len(digests(values)) == 2 and digests(values) == digests(values.clone()) != digests(changed)


def test_parts_in_another_order_are_seen() -> None:
    values = torch.arange(LARGE)
    assert digests(values) != digests(values.roll(1 << 20))


def test_a_number_and_nothing_have_digests() -> None:
    assert digests(torch.tensor(3.0)) != digests(torch.tensor(-3.0))
    assert digests(torch.zeros(0)) == [0]
