"""A view is a canonical value as a function of one raw location, with a way back.

The way back exists where the value can be written. A read of a view waits for the raw location and computes the value from the
served value. A write changes the served value. So views follow the same order, steps and accounting as raw locations, and a
block can use both side by side.

A part of a tensor (one head, the gate) is a slice of the served tensor itself. The sum of a fused residual pair is put back
into the pair as soon as the block looks at the location again or goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from executor.core.errors import Refusal
from executor.model.items import Path
from executor.model.node import View
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb


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
        within: of each head, the first column and the column after the last; None for all of it.
    """

    at: Path = ()
    columns: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None
    within: tuple[int, int] | None = None

    def read(self, served: Served) -> torch.Tensor:  # [rows, width] or [rows, heads, head size]
        tensor: torch.Tensor = tensor_at(served.value, self.at)
        if self.columns is not None:
            tensor = tensor[..., self.columns[0] : self.columns[1]]
        if self.heads is not None:
            tensor = tensor.unflatten(-1, self.heads)
        return tensor if self.within is None else tensor[..., self.within[0] : self.within[1]]


@dataclass(frozen=True, eq=False)
class Scaled(Part):
    """A tensor that the model multiplies with a number before it uses it.

    Attributes:
        factor: the number; the value is the product.
    """

    factor: float = 1.0

    def read(self, served: Served) -> torch.Tensor:  # [rows, width]
        tensor = super().read(served)
        return served.derive(
            self, [tensor], lambda: tensor * self.factor, lambda before, now: self._put(tensor, before, now)
        )

    def _put(self, tensor: torch.Tensor, before: torch.Tensor, now: torch.Tensor) -> None:  # [rows, width] each
        tensor.copy_(torch.where((before != now).any(-1, keepdim=True), now / self.factor, tensor))


@dataclass(frozen=True, eq=False)
class Shared(Part):
    """A tensor that more of the layer uses than the part it is the input of; read only.

    Attributes:
        why: what a change would reach, and what to change instead.
    """

    why: str = ""

    def read(self, served: Served) -> torch.Tensor:  # [rows, width]
        tensor = super().read(served)
        return served.derive(self, [tensor], tensor.clone, self._put)

    def write(self, served: Served, value: object) -> NoReturn:
        raise self._refusal()

    def _put(self, before: torch.Tensor, now: torch.Tensor) -> NoReturn:  # [rows, width] each
        raise self._refusal()

    def _refusal(self) -> Refusal:
        return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, f"{self.name} cannot be changed: {self.why}", location=self.name)


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
