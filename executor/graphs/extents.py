"""Hands out ranges of a fixed length of memory: the first range that is long enough."""

from __future__ import annotations

from bisect import bisect_left


class Full(Exception):
    """No range is long enough; a request that meets it runs in another tier.

    Attributes:
        what: the memory.
        wanted: the length that was asked for.
    """

    def __init__(self, what: str, wanted: int) -> None:
        super().__init__(f"{what} has no room for {wanted} more")
        self.what = what
        self.wanted = wanted


class Extents:
    """The free ranges of [0, size), in order; neighbours are always joined.

    Args:
        what: what the ranges are of, for errors.
        size: the length.
    """

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, stop)
        self._taken: dict[int, int] = {}

    @property
    def used(self) -> int:
        """The number of elements that are taken."""
        return sum(self._taken.values())

    @property
    def top(self) -> int:
        """The end of the last range that is taken."""
        return max((start + length for start, length in self._taken.items()), default=0)

    def take(self, length: int) -> int:
        """Take a range; return its start.

        Raises:
            Full: no free range is long enough.
        """
        if length < 1:
            raise ValueError(f"a range of {length}")
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= length:
                self._free[i : i + 1] = [(start + length, stop)] if stop - start > length else []
                self._taken[start] = length
                return start
        raise Full(self._what, length)

    def give(self, start: int) -> None:
        """Give back the range that begins at `start`.

        Raises:
            KeyError: no range begins there.
        """
        stop = start + self._taken.pop(start)
        i = bisect_left(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, stop))
