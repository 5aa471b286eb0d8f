"""A location of a model in which blocks can only read.

The engine's cache of such a model could not be checked after a change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from executor.core.errors import Refusal
from executor.model.items import Opaque, Path
from executor.model.layouts import Layout
from executor.model.rows import SomeRows
from executor.model.values import Change, Served
from interpose.v1 import trace_pb2 as pb


class ReadOnly(Served):
    """One location of one request in one step; no change of the block reaches the model.

    Args:
        location, value, rows, layout_of: as of `Served`.
        why: why the value cannot be changed.

    Attributes:
        why: as given.
    """

    def __init__(
        self, location: str, value: Any, rows: SomeRows, layout_of: Callable[[Path], Layout], why: str
    ) -> None:
        super().__init__(location, value, rows, layout_of)
        self.why = why

    def assign(self, value: Any) -> NoReturn:
        raise self._refusal()

    def settle(self, current: Any) -> Any:
        """Return what the model goes on with: `current`.

        Raises:
            Refusal: the block changed its copy.
        """
        self.put_back()
        for leaf in self._leaves:
            leaf.look(self.counted)
            if leaf.change is Change.MADE or (leaf.differs is not None and bool(leaf.differs)):
                raise self._refusal()
        if self._replaced(self._original, self.value):
            raise self._refusal()
        return current

    def _replaced(self, original: Any, now: Any) -> bool:
        """Return whether the block put another tensor in the place of one of its copies."""
        if isinstance(original, torch.Tensor):
            return not isinstance(now, Opaque) and not any(now is leaf.private for leaf in self._leaves)
        if isinstance(original, tuple | list):
            return any(self._replaced(one, other) for one, other in zip(original, now, strict=True))
        if isinstance(original, dict):
            return any(self._replaced(one, now[name]) for name, one in original.items())
        return False

    def _refusal(self) -> Refusal:
        return Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT, f"{self.location} cannot be changed: {self.why}", location=self.location
        )
