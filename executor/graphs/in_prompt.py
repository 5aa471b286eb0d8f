"""What a program leaves of the rows of a prompt, as the block has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from executor.graphs.by_rows import ByRows, Rows
from executor.graphs.emitted import elements_of, unpacked
from executor.graphs.template import Lowered


@dataclass(frozen=True)
class _Kept:
    """Where an output of the plan lies in the line of a row.

    Attributes:
        rows: the rows that it is of.
        begin, width: in elements of a line.
        shape, dtype: of the value for one row.
    """

    rows: Rows
    begin: int
    width: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class InPrompt(Lowered):
    """A program in the prompt's step: it leaves a line of elements for each row.

    Attributes:
        first: the row of the first line.
        kept: the outputs in the lines.
    """

    first: int = 0
    kept: Mapping[int, _Kept] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prompt: ByRows,
        at: Mapping[int, int],
        forms: tuple[tuple[tuple[int, ...], torch.dtype], ...],
        known: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> InPrompt:
        """Return what a program leaves in the prompt's step.

        Args:
            prompt: the rows of the outputs.
            at: for each output, the number of its value.
            forms: the shape and dtype of each value for one row.
            known: the outputs that are constants, of any shape.
            dtype: of the elements.
        """
        begins = [0]
        for shape, own in forms:
            begins.append(begins[-1] + elements_of(shape, own, dtype))
        kept = {
            output: _Kept(rows, begins[at[output]], begins[at[output] + 1] - begins[at[output]], *forms[at[output]])
            for output, rows in prompt.outputs.items()
            if output in at
        }
        return cls((), {}, known, first=prompt.first, kept=kept)

    def values(self, stacked: Callable[[int], torch.Tensor], steps: int) -> dict[int, torch.Tensor]:
        """Return the outputs of the plan in the prompt's step: [1, ...] each.

        Args:
            stacked: returns the lines as what tap 0 read: [1, rows, elements].
            steps: 1.
        """
        found = {output: known.expand(steps, *known.shape) for output, known in self.known.items()}
        lines = stacked(0)[0] if any(one.width for one in self.kept.values()) else None
        for output, one in self.kept.items():
            rows = one.rows
            if lines is None:
                mine = torch.zeros((rows.after - rows.first, *one.shape), dtype=one.dtype)
            else:
                part = lines[rows.first - self.first : rows.after - self.first, one.begin : one.begin + one.width]
                mine = unpacked(part, one.shape, one.dtype)
            value = mine[0] if rows.dim is None else mine.squeeze(rows.dim + 1).movedim(0, rows.dim)
            found[output] = value[None]
        return found
