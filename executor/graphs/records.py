"""The records of requests: what the kernel reads of their taps, without their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor.graphs.limits import RECORD
from executor.graphs.operations import ALL, Code, Tap
from executor.graphs.shares import Part


@dataclass(frozen=True)
class Drawing:
    """The record of a request in some steps, without its own addresses.

    These say where its vectors and its range of the output are.

    Attributes:
        since, until: the first step, and the step after the last.
        record: the numbers, [length].
        reads: the positions of the offsets of READ in it.
        vectors: the tap of each position with a vector, and whether it is the direction's.
        size, parts: of the request's share.
        sites: with open taps.
    """

    since: int
    until: int
    record: npt.NDArray[np.int32]
    reads: npt.NDArray[np.intp]
    vectors: tuple[tuple[int, int, bool], ...]
    size: int
    parts: tuple[Part, ...]
    sites: frozenset[int]


class Records:
    """Draws records.

    Args:
        sites: how many sites the model has.
        taps: how many taps a request has at most.
        dtype, on_cpu: of the model.

    Attributes:
        heads: the numbers ahead of the taps in a record.
        length: of a record.
    """

    def __init__(self, sites: int, taps: int, dtype: torch.dtype, on_cpu: bool) -> None:
        self.heads = 2 * sites
        self.length = self.heads + RECORD * taps
        self._dtype = dtype
        self._on_cpu = on_cpu

    def draw(self, taps: tuple[Tap, ...], step: int, count: int) -> Drawing:
        """Return the record of requests with some taps, for a step with `count` of their rows."""
        edges = sorted({edge for tap in taps for edge in tap.steps} | {0, ALL})
        record = np.zeros(self.length, np.int32)
        heads = record[: self.heads].reshape(-1, 2)
        ints = record[self.heads :].reshape(-1, RECORD)
        floats = ints.view(np.float32)
        number, offset, parts = 0, 0, []
        reads: list[int] = []
        vectors: list[tuple[int, int, bool]] = []
        for i in sorted(range(len(taps)), key=lambda i: taps[i].site):
            tap = taps[i]
            first, after = tap.rows[0], min(tap.rows[1], count)
            if not tap.steps[0] <= step < tap.steps[1] or first >= after:
                continue
            at, last = self.heads + number * RECORD, -1
            if tap.vector is not None:
                vectors.append((at + 5, i, False))
            if tap.code is Code.READ:
                last = offset
                reads.append(at + 7)
                parts.append(Part(i, offset, after - first, tap.width))
                offset += (after - first) * tap.width
            elif tap.direction is not None:
                vectors.append((at + 7, i, True))
            stride = tap.width if tap.vector is not None and tap.vector.dim() == 2 else 0
            ints[number, :8] = (tap.code, *tap.columns, first, after, -1, stride, last)
            with np.errstate(over="ignore"):
                ints[number, 15] = self.is_wide(tap)
                floats[number, 8:15] = (self._number(tap), *tap.coefficients, tap.low, tap.high)
            if not heads[tap.site, 1]:
                heads[tap.site, 0] = number
            heads[tap.site, 1] += 1
            number += 1
        return Drawing(
            since=max(edge for edge in edges if edge <= step),
            until=min(edge for edge in edges if edge > step),
            record=record,
            reads=np.array(reads, np.intp),
            vectors=tuple(vectors),
            size=offset,
            parts=tuple(parts),
            sites=frozenset(int(site) for site in np.flatnonzero(heads[:, 1])),
        )

    def is_wide(self, tap: Tap) -> bool:
        """Return whether a tap's vector is wider than the model's numbers."""
        vector = tap.vector
        return tap.exact and self._dtype.itemsize < 4 and vector is not None and vector.dtype == torch.float32

    def _number(self, tap: Tap) -> float:
        """Return the number of a tap as torch has it on the device.

        The CPU rounds a number before it adds it.
        """
        if tap.code is Code.ADD and self._on_cpu:
            return torch.tensor(tap.number, dtype=self._dtype).item()
        return tap.number


def most_read(taps: Sequence[Tap]) -> int:
    """Return the most elements that taps read in one step with one row of the request."""
    begins = {tap.steps[0] for tap in taps if tap.code is Code.READ}
    return max((read_in(taps, step, 1) for step in begins), default=0)


def read_in(taps: Sequence[Tap], step: int, count: int) -> int:
    """Return the elements that taps read in a step with `count` rows of the request."""
    reads = (tap for tap in taps if tap.code is Code.READ and tap.steps[0] <= step < tap.steps[1])
    return sum(max(0, min(tap.rows[1], count) - tap.rows[0]) * tap.width for tap in reads)
