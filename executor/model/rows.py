"""The rows of a batch's tensors that a block sees.

They are the rows of its request, or of all prompts of its trace.
"""

from __future__ import annotations

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

    `padded` is the number of rows with the engine's padding.
    """

    start: int
    stop: int
    total: int
    padded: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:  # [batch rows, ...] -> [rows, ...]
        return tensor[self.start : self.stop]

    def holds(self, tensor: torch.Tensor) -> bool:  # any shape
        """Return whether a tensor has the batch's rows."""
        return tensor.shape[0] in (self.total, self.padded)

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
