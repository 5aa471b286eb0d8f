"""A module that a block wants applied to its own values."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from executor.model.node import Node
from executor.model.parameters import Wanted


@dataclass(frozen=True)
class Call:
    """A module to apply, and copies of the values that the block passed.

    Attributes:
        node: the module; the pseudo node `logits` stands for the model's whole unembedding.
        single: whether the values are single rows, [features] instead of [rows, features].
        wanted: the part of the module's weights to read, if the module is not applied.
    """

    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    single: bool
    wanted: Wanted | None = None

    def __str__(self) -> str:
        return f"{self.node.path}(…)" if self.wanted is None else f"{self.node.path}.{self.wanted.name}"

    @property
    def tensors(self) -> list[torch.Tensor]:  # any shape
        """The tensors among the values."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor)]

    def fingerprint(self) -> int:
        """Return a number that is equal on two ranks only for the same module and layout of values."""
        values = [*enumerate(self.args), *self.kwargs.items()]
        layout = [
            (key, tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else (key, value)
            for key, value in values
        ]
        return zlib.crc32(f"{self.node.path}{layout}{self.wanted}".encode())
