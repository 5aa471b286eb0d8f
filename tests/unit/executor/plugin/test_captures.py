"""A graph is kept if all ranks have captured it, and its addresses are exchanged then alone."""

from __future__ import annotations

import pytest

from executor.plugin.captures import Captures


class Ranks:
    """A rank beside another, whose votes are given."""

    several = True

    def __init__(self, theirs: list[int]) -> None:
        self.theirs = theirs

    def compare(self, mine: list[int]) -> list[list[int]]:
        return [mine, self.theirs]


class Sums:
    """Stands in for vLLM's kernel, which needs two GPUs."""

    def __init__(self, room: int = 100) -> None:
        self.disabled = False
        self._IS_CAPTURING = False
        self.exchanged = 0
        self._room = room

    def register_graph_buffers(self) -> None:
        if self.exchanged == self._room:
            raise RuntimeError("no room")
        self.exchanged += 1


class Communicator:
    def __init__(self, sums: Sums) -> None:
        self.ca_comm = sums


def modes(captures: Captures, sums: Sums) -> tuple[bool, bool]:
    """Return whether a capture takes the kernel's sums, and whether it takes them as those of a graph."""
    with captures.taking_part():
        found = not sums.disabled, sums._IS_CAPTURING
    assert not sums.disabled and not sums._IS_CAPTURING
    return found


@pytest.mark.parametrize(("mine", "theirs"), [(None, 7), (5, -1), (None, -1)])
def test_a_capture_that_failed_on_a_rank_is_kept_nowhere(mine: int | None, theirs: int) -> None:
    sums, ranks = Sums(), Ranks([9])
    captures = Captures(ranks, Communicator(sums))
    assert captures.kept(4) == 9 and sums.exchanged == 1
    assert modes(captures, sums) == (True, True)
    ranks.theirs = [theirs]
    assert captures.kept(mine) is None and sums.exchanged == 1
    ranks.theirs = [2]
    assert modes(captures, sums) == (False, False)  # NCCL's sums from now on
    assert captures.kept(3) == 3 and sums.exchanged == 1


def test_a_kernel_without_room_for_addresses_leaves_the_sums_to_nccl() -> None:
    sums = Sums(room=1)
    captures = Captures(Ranks([1]), Communicator(sums))
    assert captures.kept(1) == 1
    assert captures.kept(1) is None
    assert captures.kept(1) == 1 and modes(captures, sums) == (False, False)


def test_a_capture_that_breaks_off_leaves_the_sums_as_they_were() -> None:
    sums = Sums()
    captures = Captures(Ranks([1]), Communicator(sums))
    with pytest.raises(RuntimeError), captures.taking_part():
        raise RuntimeError
    assert not sums._IS_CAPTURING and not sums.disabled


@pytest.mark.parametrize(("mine", "theirs", "both"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_a_graph_counts_as_checked_if_it_is_right_on_all_ranks(mine: bool, theirs: int, both: bool) -> None:
    assert Captures(Ranks([theirs])).equal(mine) is both
