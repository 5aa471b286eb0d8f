"""Which rows of a step have an open program, and where it leaves their values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from executor.graphs.emitted import Emitted, elements_of
from executor.graphs.shares import Part


class OpenPrograms:
    """The open programs of a step.

    Args:
        slots: the most requests in a batch.
        rows: the most rows of a step.
        scratch: where rows without an open program leave their values.
        device: of the model.

    Attributes:
        rows: as of `Tables.open_rows`.
        moved: whether a program has opened or closed since the last step.
    """

    def __init__(self, slots: int, rows: int, scratch: int, device: torch.device) -> None:
        self.rows = torch.tensor([[scratch, 0]]).repeat(rows, 1).to(device)
        self.moved = False
        self._scratch = scratch
        # By slot: where its program leaves its values, the program's number, its first row and the row after the last, and the
        # elements of a row.
        self._closed = (scratch, 0, 0, 0, 0)
        self._of_slot = np.full((slots + 1, len(self._closed)), self._closed, np.int64)
        self._may_be_open = False  # whether a row on the device may have an open program

    def open(self, slot: int, now: tuple[int, ...]) -> None:
        """Open a request's program from this step on.

        Args:
            slot: the request's.
            now: where the program leaves its values, its number, its first row and the row after the last, and the elements of a
                row.
        """
        if tuple(self._of_slot[slot]) != now:
            self._of_slot[slot] = now
            self.moved = True

    def close(self, slot: int) -> None:
        """Close a request's program from this step on, if it has one."""
        self.open(slot, self._closed)

    def begins_of(self, slots: Sequence[int]) -> list[int]:
        """Return where in the output the programs of some slots leave their values in this step."""
        begins: list[int] = self._of_slot[list(slots), 0].tolist()
        return begins

    def close_rows(self) -> None:
        """Have no row of the device's tables an open program."""
        if self._may_be_open:
            self.rows[:, 0].fill_(self._scratch)
            self.rows[:, 1].zero_()
            self._may_be_open = False

    def of_step(self, table: npt.NDArray[np.int32]) -> npt.NDArray[np.int64] | None:
        """Return what `rows` has to have for a step, None if no program is open.

        Args:
            table: as of `Tables.rows`.
        """
        self.moved = False
        if not self._of_slot[:, 1].any():
            self.close_rows()
            return None
        begin, program, first, after, width = self._of_slot[table[:, 0]].T
        row = table[:, 1]
        opened = (first <= row) & (row < after)
        found = np.empty((len(table), 2), np.int64)
        found[:, 0] = np.where(opened, begin + (row - first) * width, self._scratch)
        found[:, 1] = np.where(opened, program, 0)
        self._may_be_open = True
        return found


def left_by(emitted: Emitted, number: int, count: int, dtype: torch.dtype) -> list[Part]:
    """Return what a program leaves in a step with `count` rows of the request.

    In the prompt's step, the lines of all of its rows are one part.

    Args:
        emitted: what it leaves for a row.
        number: of its first value, as of `Part.tap`.
        count: the rows.
        dtype: of the output.
    """
    parts, offset = list[Part](), 0
    if count > 1:
        width, rows = emitted.elements(dtype), emitted.prompt_rows
        return [Part(number + len(emitted.forms), 0, rows, width)] if width and rows else []
    for i, (shape, form_dtype) in enumerate(emitted.forms):
        width = elements_of(shape, form_dtype, dtype)
        parts.append(Part(number + i, offset, 1, width, (shape, form_dtype)))
        offset += width
    return parts
