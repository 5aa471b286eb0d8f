"""The rows of a batch's tensors that a block sees.

They are the rows of its request, or of all prompts of its trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class SomeRows(Protocol):
    """The rows of a batch's tensors that a block sees."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor, [rows, ...], has the rows of the batch."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's rows of a tensor, [rows, ...]."""

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:
        """Write `mine` into the block's rows of `tensor`; both are [rows, ...]."""


@dataclass(frozen=True)
class Rows:
    """The rows [start, stop) of one request in a batch of `total` rows.

    `padded` is the number of rows with the engine's padding. With `axes`, the model's positions are [axes, rows] instead of
    [rows]: a batch of as many rows as there are axes must not take them for rows.
    """

    start: int
    stop: int
    total: int
    padded: int
    axes: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:  # [batch rows, ...] -> [rows, ...]
        return tensor[self.start : self.stop]

    def holds(self, tensor: torch.Tensor) -> bool:  # any shape
        """Return whether a tensor has the batch's rows."""
        rows = (self.total, self.padded)
        if self.axes and tensor.dim() == 2 and tensor.shape[1] in rows and not tensor.is_floating_point():
            return False
        return tensor.shape[0] in rows

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:  # tensor: [batch rows, ...], mine: [rows, ...]
        """Write `mine` into these rows of `tensor`."""
        self.of(tensor).copy_(mine)


@dataclass(frozen=True)
class ManyRows:
    """The rows of several requests, one after the other."""

    parts: tuple[Rows, ...]

    def holds(self, tensor: torch.Tensor) -> bool:  # any shape
        """Return whether a tensor has the batch's rows."""
        return self.parts[0].holds(tensor)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:  # [batch rows, ...] -> [rows, ...]
        return torch.cat([part.of(tensor) for part in self.parts])

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:  # tensor: [batch rows, ...], mine: [rows, ...]
        """Write `mine` into these rows of `tensor`."""
        pieces = mine.split([part.stop - part.start for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.write(tensor, piece)


@dataclass(frozen=True)
class BatchRows:
    """The rows of several requests in a batch.

    Attributes:
        parts: the rows of each request.
        start, stop: the rows from the first request's to the last request's.
        sizes: how `start` to `stop` is split into the rows of requests and what lies between them; () where too much does.
        picks: the index in `sizes` of each request.
        lengths: the number of rows of each request.
        complete: whether `start` to `stop` is the requests' rows in their order, and nothing else.
    """

    parts: tuple[Rows, ...]
    start: int
    stop: int
    sizes: tuple[int, ...]
    picks: tuple[int, ...]
    lengths: tuple[int, ...]
    complete: bool

    @classmethod
    def of(cls, parts: Sequence[Rows]) -> BatchRows:
        """Return the rows of some requests, none of which has a row of another."""
        order = sorted(range(len(parts)), key=lambda index: parts[index].start)
        start, stop = parts[order[0]].start, parts[order[-1]].stop
        lengths = tuple([part.stop - part.start for part in parts])
        sizes: list[int] = []
        picks = [0] * len(parts)
        at = start
        for index in order:
            if parts[index].start > at:
                sizes.append(parts[index].start - at)
            picks[index] = len(sizes)
            sizes.append(lengths[index])
            at = parts[index].stop
        dense = stop - start <= 2 * sum(lengths)
        complete = picks == list(range(len(parts))) and len(sizes) == len(parts)
        return cls(tuple(parts), start, stop, tuple(sizes) if dense else (), tuple(picks), lengths, complete)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:  # [batch rows, ...] -> [rows, ...] each
        """Return the rows of each request, as views."""
        if not self.sizes:
            return [part.of(tensor) for part in self.parts]
        pieces = tensor[self.start : self.stop].split(self.sizes)
        return list(pieces) if self.complete else [pieces[pick] for pick in self.picks]

    def copies(self, tensor: torch.Tensor) -> list[torch.Tensor]:  # [batch rows, ...] -> [rows, ...] each
        """Return a copy of the rows of each request; each has memory of its own."""
        if not self.sizes or tensor.device.type != "cpu":
            return copied(self.split(tensor))
        pieces = torch.split_with_sizes_copy(tensor[self.start : self.stop], self.sizes)
        return list(pieces) if self.complete else [pieces[pick] for pick in self.picks]

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:  # [batch rows, ...] -> [rows of all, ...]
        """Return the rows of all requests, one request after the other."""
        return tensor[self.start : self.stop] if self.complete else torch.cat(self.split(tensor))


def copied(parts: list[torch.Tensor]) -> list[torch.Tensor]:  # [rows, ...] each
    """Return contiguous copies of tensors of one dtype and device; each has memory of its own."""
    if parts[0].device.type == "cpu":
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]
    made = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
    torch._foreach_copy_(made, parts)
    return made
