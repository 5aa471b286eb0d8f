"""A request's pieces are copied once, and what a loop reads side by side is not copied again."""

from __future__ import annotations

import pytest
import torch

from executor.graphs.landing import _side_by_side
from executor.graphs.pieces import Collected, Piece, gathered
from executor.graphs.tables import Part, Share

PARTS = tuple(Part(tap, 4 * tap, 1, 4) for tap in range(3))


def piece(steps: int, first: int = 0, parts: tuple[Part, ...] = PARTS) -> Piece:
    """A piece whose values are columns of a larger memory, as in the blocks of the host."""
    memory = torch.arange(20.0 * steps).reshape(steps, 20) + 1000 * first
    return Piece(Share(5, 12, parts), memory[:, 5:17])


def test_pieces_with_one_layout_become_one() -> None:
    pieces = [piece(3), piece(2, 1), piece(1, 2, PARTS[:2]), piece(4, 3)]
    found = gathered(pieces)
    assert [len(one.values) for one in found] == [5, 1, 4]
    assert torch.equal(torch.cat([one.values for one in found]), torch.cat([one.values for one in pieces]))
    for one in pieces:
        one.values.fill_(-1)
    assert all(one.values.ge(0).all() for one in found), "the pieces' memory gets another owner"
    assert gathered([]) == []


def test_one_piece_is_read_without_a_copy() -> None:
    [joined] = gathered([piece(3), piece(2, 1)])
    collected = Collected([joined])
    given = [collected.stacked(tap, 4) for tap in range(3)]
    assert all(one is not None and one.shape == (4, 1, 4) for one in given)
    values = [one for one in given if one is not None]
    rows = _side_by_side(values)
    assert rows is not None and rows.data_ptr() == joined.values.data_ptr()
    assert torch.equal(rows, torch.stack(values, 1).flatten(0, 1)) and rows.is_contiguous()


@pytest.mark.parametrize("taps", [(0, 1), (1, 2), (0, 2), (2, 1, 0), (0, 1, 1), (1, 2, 0)])
def test_what_does_not_lie_side_by_side_is_not_taken_for_it(taps: tuple[int, ...]) -> None:
    collected = Collected(gathered([piece(3)]))
    values = [one for tap in taps if (one := collected.stacked(tap)) is not None]
    assert len(values) == len(taps) and _side_by_side(values) is None


def test_tensors_of_several_memories() -> None:
    one, two = torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)
    assert _side_by_side([one, two]) is None
    assert _side_by_side([torch.zeros(3, 2, 4)[:, :1], torch.zeros(3, 2, 4)[:, 1:]]) is None
