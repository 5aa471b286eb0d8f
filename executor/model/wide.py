"""Values over a whole prompt of which a step computes some rows only.

A prompt that is longer than a step of the engine is computed in chunks. What a block reads there is kept from chunk to chunk
(`Kept`). The block is served all rows at once (`Wide`), and of what it changed the rows of the step go back. The rows of earlier
chunks have gone back in their own steps. `Wide` compares them with what the block makes of them now that it has all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.core.errors import Refusal
from executor.model.bits import same_bits
from executor.model.items import Opaque, Path
from executor.model.layouts import Layout
from executor.model.rows import SomeRows
from executor.model.values import Change, Served
from interpose.v1 import trace_pb2 as pb


class Kept:
    """The tensors of a location over a whole prompt, as far as its chunks have come.

    Args:
        tokens: the rows of the prompt.

    Attributes:
        tokens: as given.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._served: list[torch.Tensor] = []  # [tokens, ...] each: what the model had there
        self._changed: dict[int, torch.Tensor] = {}  # [tokens, ...] each: what it went on with, of changed tensors

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(one.nbytes for one in (*self._served, *self._changed.values()))

    def put(self, index: int, mine: torch.Tensor, start: int) -> torch.Tensor:  # [rows, ...] -> [tokens, ...]
        """Keep the rows of a step; return all rows. Rows that have not come are zeros.

        Args:
            index: which tensor of the location.
            mine: the rows.
            start: the first of them in the prompt.
        """
        if index == len(self._served):
            with torch._C._InferenceMode(False):  # tensors of that mode count no changes
                self._served.append(torch.zeros((self.tokens, *mine.shape[1:]), dtype=mine.dtype, device=mine.device))
        whole = self._served[index]
        whole[start : start + mine.shape[0]] = mine
        return whole

    def change(self, index: int, now: torch.Tensor, start: int, stop: int) -> None:  # [tokens, ...]
        """Keep what the model goes on with in the rows [start, stop)."""
        changed = self._changed.get(index)
        if changed is None:
            changed = self._changed[index] = self._served[index].clone()
        changed[start:stop] = now[start:stop].to(changed)

    def changed(self, index: int) -> bool:
        """Return whether a tensor was changed in a chunk."""
        return index in self._changed

    def differs(self, index: int, now: torch.Tensor, stop: int) -> bool:  # [tokens, ...]
        """Return whether the rows before `stop` are other rows than the model went on with.

        Rounding may depend on where a row stands among others.
        """
        then = self._changed.get(index, self._served[index])[:stop]
        mine = now[:stop].to(then)
        if same_bits(mine, then):
            return False
        if not then.is_floating_point():
            return True
        allowed = 16 * torch.finfo(then.dtype).eps
        return not bool(torch.allclose(mine, then, rtol=allowed, atol=allowed, equal_nan=True))


class Wide(Served):
    """A location of one request whose prompt is computed in chunks, in the step of one of them.

    Args:
        location, value, rows, layout_of: as of `Served`.
        kept: the rows of the chunks so far.
        start: the first row of the step in the prompt.
    """

    def __init__(
        self,
        location: str,
        value: Any,
        rows: SomeRows,
        layout_of: Callable[[Path], Layout],
        kept: Kept,
        start: int,
    ) -> None:
        self._kept = kept
        self._start = self._stop = start
        super().__init__(location, value, rows, layout_of)

    def _widened(self, mine: torch.Tensor) -> torch.Tensor:  # [rows, ...] -> [tokens, ...]
        self._stop = self._start + mine.shape[0]
        return self._kept.put(len(self._leaves), mine, self._start)

    def _own_rows(self, whole: torch.Tensor) -> torch.Tensor:  # [tokens, ...] -> [rows, ...]
        if whole.shape[0] != self._kept.tokens:
            raise ValueError(f"it has {whole.shape[0]} rows, and the prompt has {self._kept.tokens} tokens")
        return whole[self._start : self._stop]

    def _settle_tensor(
        self, original: torch.Tensor, current: torch.Tensor, now: Any
    ) -> torch.Tensor:  # [batch rows, ...]
        if isinstance(now, Opaque):
            return current
        index = next(i for i, leaf in enumerate(self._leaves) if leaf.original is original)
        leaf = self._leaves[index]
        changed = now is not leaf.private or leaf.change is not Change.NONE
        if (changed or self._kept.changed(index)) and self._kept.differs(index, now, self._start):
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"the prompt was computed in chunks, and the change at {self.location} made of an earlier chunk's rows what it "
                "does not make of them among all rows; let each row's change depend on that row alone, or have "
                "max_num_batched_tokens raised where the model is served",
                location=self.location,
            )
        found = super()._settle_tensor(original, current, now)
        if changed:
            self._kept.change(index, now, self._start, self._stop)
        return found


class Keeping(Wide):
    """A `Wide` value that no block is served: its rows are only kept."""

    def _copied(self, mine: torch.Tensor) -> torch.Tensor:  # [tokens, ...]
        return mine
