"""What a loop reads side by side is not copied again."""

from __future__ import annotations

import pytest
import torch

from executor.graphs.landing import _side_by_side
from executor.graphs.pieces import Collected, Piece
from executor.graphs.shares import Part, Share

PARTS = tuple(Part(tap, 4 * tap, 1, 4) for tap in range(3))


def piece(steps: int, first: int = 0, parts: tuple[Part, ...] = PARTS) -> Piece:
    """A piece whose values are columns of a larger memory, as in the blocks of the host."""
    memory = torch.arange(20.0 * steps).reshape(steps, 20) + 1000 * first
    return Piece(Share(5, 12, parts), memory[:, 5:17])


@pytest.mark.parametrize("taps", [(0, 1), (1, 2), (0, 2), (2, 1, 0), (0, 1, 1), (1, 2, 0)])
def test_what_does_not_lie_side_by_side_is_not_taken_for_it(taps: tuple[int, ...]) -> None:
    collected = Collected([piece(3)])
    values = [one for tap in taps if (one := collected.stacked(tap)) is not None]
    assert len(values) == len(taps) and _side_by_side(values) is None


def test_tensors_of_several_memories() -> None:
    one, two = torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)
    assert _side_by_side([one, two]) is None
    assert _side_by_side([torch.zeros(3, 2, 4)[:, :1], torch.zeros(3, 2, 4)[:, 1:]]) is None
