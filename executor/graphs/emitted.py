"""The values that a program leaves in a step, as elements of the output, and the way back.

The output holds the dtype of the model. A value of another dtype lies there bit by bit, and fills its last element up with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Emitted:
    """What the program of a request leaves in each of its steps.

    Attributes:
        program: the number of the program, from 1.
        steps: the first step and the step after the last in which it runs; a request has one row in each of them, but for the
            prompt's step.
        forms: the shape and dtype of each value.
        prompt: the rows of the prompt's step in which it runs, the first row and the row after the last; None: it is for steps of
            one row.
    """

    program: int
    steps: tuple[int, int]
    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    prompt: tuple[int, int] | None = None

    @property
    def prompt_rows(self) -> int:
        """How many rows of the prompt's step it runs for."""
        return 0 if self.prompt is None else self.prompt[1] - self.prompt[0]

    def elements(self, of: torch.dtype) -> int:
        """Return how many elements of a dtype hold all values of a step."""
        return sum(elements_of(shape, dtype, of) for shape, dtype in self.forms)


def elements_of(shape: Sequence[int], dtype: torch.dtype, of: torch.dtype) -> int:
    """Return how many elements of the dtype `of` hold a value."""
    return -(-math.prod(shape) * dtype.itemsize // of.itemsize)


def packed(values: torch.Tensor, of: torch.dtype) -> torch.Tensor:  # [rows, ...] -> [rows, elements]
    """Return values bit by bit as elements of the dtype `of`."""
    flat = values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)
    if flat.dtype == of:
        return flat
    if not flat.shape[1]:
        return flat.new_zeros((len(flat), 0), dtype=of)
    flat = flat.contiguous()
    if flat.dtype.itemsize % of.itemsize:
        flat = flat.view(torch.uint8)
        flat = F.pad(flat, (0, -flat.shape[1] % of.itemsize))
    return flat.view(of)


def unpacked(lines: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:  # [steps, elements]
    """Return the values that `packed` made elements of: [steps, *shape] in their own dtype."""
    size = math.prod(shape) * dtype.itemsize
    if lines.dtype == dtype:
        return lines.unflatten(1, tuple(shape)) if shape else lines.squeeze(1)
    if not size:
        return lines.new_zeros((len(lines), *shape), dtype=dtype)
    raw = lines.contiguous().view(torch.uint8)[:, :size].clone(memory_format=torch.contiguous_format)
    return raw.view(dtype).view(len(lines), *shape)
