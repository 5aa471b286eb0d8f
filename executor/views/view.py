"""A view is a canonical value as a function of one raw location, with a way back.

The way back exists where the value can be written. A read of a view waits for the raw location and computes the value from the
served value. A write changes the served value. So views follow the same order, steps and accounting as raw locations, and a
block can use both side by side.

A part of a tensor (one head, the gate) is a slice of the served tensor itself. The sum of a fused residual pair is put back
into the pair as soon as the block looks at the location again or goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from executor.model.items import Path
from executor.model.node import View
from executor.model.values import Served


def tensor_at(value: Any, path: Path) -> Any:
    """Return the item of a served value at a path of keys."""
    for key in path:
        value = value[key]
    return value


@dataclass(frozen=True, eq=False)
class Part(View):
    """A tensor of the location, or columns of it, split into heads where it has heads.

    Attributes:
        at: where the tensor is in the location's value.
        columns: the first column and the column after the last; None for all columns.
        heads: the number and the width of the heads, if the columns are heads side by side.
    """

    at: Path = ()
    columns: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None

    def read(self, served: Served) -> torch.Tensor:  # [rows, width] or [rows, heads, head size]
        tensor: torch.Tensor = tensor_at(served.value, self.at)
        if self.columns is not None:
            tensor = tensor[..., self.columns[0] : self.columns[1]]
        return tensor if self.heads is None else tensor.unflatten(-1, self.heads)


@dataclass(frozen=True, eq=False)
class Stream(View):
    """The residual stream; the engine holds it as one tensor, or as two tensors with this sum.

    A changed row of a pair is written as (0, value). The norm that follows adds the two numbers, which gives the value exactly.
    A row that did not change keeps both halves.

    Attributes:
        at: where the tensors are in the location's value. The second tensor may be None at run time, because the first layer
            gets the embeddings alone.
    """

    at: tuple[Path, ...] = field(default=((),))

    def read(self, served: Served) -> torch.Tensor:  # [rows, width] or [rows, heads, head size]
        tensors = self._tensors(served)
        if len(tensors) == 1:
            return tensors[0]
        return served.derive(
            self, tensors, lambda: tensors[0] + tensors[1], lambda before, now: self._put(served, before, now)
        )

    def _tensors(self, served: Served) -> list[torch.Tensor]:  # [rows, hidden]
        found = (tensor_at(served.value, path) for path in self.at)
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]

    def _put(self, served: Served, before: torch.Tensor, now: torch.Tensor) -> None:  # [rows, hidden]
        changed = (before != now).any(-1, keepdim=True)  # [tokens, 1]
        added, residual = self._tensors(served)
        added.masked_fill_(changed, 0)
        residual.copy_(torch.where(changed, now, residual))
