"""The values of a block that runs on shapes, without elements; a change reaches nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.model.items import Path
from executor.model.layouts import Layout, Replicated
from executor.model.rows import SomeRows
from executor.model.values import Served


class Shapes(Served):
    """A location of a scan: values without elements.

    An assigned value is checked and reaches nothing.

    Args:
        location, value, rows, layout_of: as of `Served`.
        like: makes a tensor without elements, with the shape and dtype of another tensor.
    """

    def __init__(
        self,
        location: str,
        value: Any,
        rows: SomeRows,
        layout_of: Callable[[Path], Layout],
        like: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._like = like
        super().__init__(location, value, rows, layout_of)

    def _gathered(
        self, layout: Layout, shard: torch.Tensor
    ) -> torch.Tensor:  # [rows, ..., part] -> [rows, ..., features]
        return layout.gather_dummy(shard) if isinstance(layout, Replicated) else layout.gather(shard)

    def _copied(self, mine: torch.Tensor) -> torch.Tensor:  # [rows, ...]
        return self._like(mine)

    def owns(self, tensor: torch.Tensor) -> bool:  # any shape
        return False

    def changed(self) -> list[torch.Tensor]:  # any shapes
        """Return the tensors that the block changed in place, or put in the places of others."""
        mine = [(leaf.private, leaf.version) for leaf in self._leaves]
        seen = [*mine, *((one.value, one.version) for _, one in self._derived)]
        found = [tensor for tensor, version in seen if tensor._version != version]
        given = {id(tensor) for tensor, _ in mine}
        return found + [tensor for tensor in _tensors(self.value) if id(tensor) not in given]

    def put_back(self) -> None:
        pass

    def settle(self, current: Any) -> Any:
        return current


def _tensors(value: Any) -> list[torch.Tensor]:  # any shapes
    """Return the tensors in a value."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list | dict):
        return [one for item in (value.values() if isinstance(value, dict) else value) for one in _tensors(item)]
    return []
