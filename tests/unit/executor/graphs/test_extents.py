"""Ranges of memory, and the bank of vectors."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.graphs.bank import Bank
from executor.graphs.extents import Extents, Full


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_ranges_never_overlap_and_come_back_whole(orders: list[tuple[bool, int]]) -> None:
    extents = Extents("a test", 40)
    held: dict[int, int] = {}
    for take, length in orders:
        if take:
            try:
                start = extents.take(length)
            except Full:
                free = [x for x in range(40) if not any(a <= x < a + n for a, n in held.items())]
                runs = [1]
                for one, other in itertools.pairwise(free):
                    runs.append(runs[-1] + 1 if other == one + 1 else 1)
                assert not free or max(runs) < length
                continue
            assert all(start + length <= a or a + n <= start for a, n in held.items())
            held[start] = length
        elif held:
            start = sorted(held)[length % len(held)]
            extents.give(start)
            del held[start]
        assert extents.used == sum(held.values())
        assert extents.top == max((a + n for a, n in held.items()), default=0)
    for start in held:
        extents.give(start)
    assert extents.take(40) == 0


def test_a_range_is_given_back_once() -> None:
    extents = Extents("a test", 4)
    start = extents.take(2)
    extents.give(start)
    with pytest.raises(KeyError):
        extents.give(start)


def make_bank(elements: int = 16, most: int = 8) -> Bank:
    return Bank(elements, torch.bfloat16, torch.device("cpu"), most)


def test_equal_vectors_of_a_tenant_are_held_once() -> None:
    bank = make_bank()
    one = bank.add("a", torch.ones(4))
    assert bank.add("a", torch.ones(2, 2)) == one
    assert bank.add("b", torch.ones(4)) != one
    assert bank.used == 8
    bank.drop(one)
    assert bank.used == 8
    bank.drop(one)
    assert bank.used == 4


def test_vectors_are_rounded_to_the_dtype_of_the_bank() -> None:
    bank = make_bank()
    values = torch.tensor([1 / 3, -2 / 3])
    start = bank.add("a", values)
    assert torch.equal(bank.values[start : start + 2], values.bfloat16())


def test_a_vector_of_one_number_repeated_is_held_as_its_numbers() -> None:
    bank = make_bank()
    for one in (torch.tensor(2.0).expand(1), torch.tensor(2.0).expand(3)):
        start = bank.add("a", one)
        assert torch.equal(bank.values[start : start + len(one)], one.bfloat16())


def test_a_tenant_has_its_share_and_no_more() -> None:
    bank = make_bank()
    bank.add("a", torch.arange(8.0))
    with pytest.raises(Full, match="share of a"):
        bank.add("a", torch.ones(1))
    bank.add("b", torch.arange(8.0))
    with pytest.raises(Full, match="bank of vectors has no room"):
        bank.add("c", torch.ones(1))


def test_a_vector_that_was_given_up_leaves_room() -> None:
    bank = make_bank()
    bank.drop(bank.add("a", torch.arange(8.0)))
    first = bank.add("a", torch.arange(8.0))
    assert torch.equal(bank.values[first : first + 8], torch.arange(8.0).bfloat16())
