"""Which rows of a batch's tensors a block sees: those of its request, or those of all prompts of its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class SomeRows(Protocol):
    """Which rows of a batch's tensors a block sees."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has them."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return them."""

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:
        """Put `mine` where they are in `tensor`."""


@dataclass(frozen=True)
class Rows:
    """The rows [start, stop) of one request in a batch of `total` rows (`padded` with the engine's padding)."""

    start: int
    stop: int
    total: int
    padded: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.start : self.stop]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the batch's rows."""
        return tensor.shape[0] in (self.total, self.padded)

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:
        """Put `mine` where these rows are in `tensor`."""
        self.of(tensor).copy_(mine)


@dataclass(frozen=True)
class ManyRows:
    """The rows of several requests, one after the other."""

    parts: tuple[Rows, ...]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the batch's rows."""
        return self.parts[0].holds(tensor)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.of(tensor) for part in self.parts])

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:
        """Put `mine` where these rows are in `tensor`."""
        pieces = mine.split([part.stop - part.start for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.write(tensor, piece)
