"""What a request's taps have read, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor.graphs.emitted import unpacked
from executor.graphs.shares import Part, Share


@dataclass(frozen=True)
class Piece:
    """What a request read in some consecutive steps.

    Attributes:
        share: what lies in `values`.
        values: [steps, elements of the share].
    """

    share: Share
    values: torch.Tensor


class Collected:
    """All that a request read, step by step.

    Args:
        pieces: in the order of the steps.
        prompts: how many of the first pieces are of a prompt's step with several rows.
    """

    def __init__(self, pieces: Sequence[Piece], prompts: int = 0) -> None:
        self._pieces = tuple(pieces)
        self._prompts = prompts

    @property
    def of_prompt(self) -> Collected:
        """What was read in a step in which the request had several rows."""
        return Collected(self._pieces[: self._prompts])

    @property
    def of_later_steps(self) -> Collected:
        """What was read in steps in which the request had one row."""
        return Collected(self._pieces[self._prompts :])

    def columns(self, taps: Sequence[int], most: int) -> torch.Tensor | None:  # [steps, taps, rows * columns]
        """Return the values of some taps that lie one after the other in all steps, without a copy.

        Args:
            taps: their numbers, each once.
            most: the steps to return.

        Returns:
            None if they do not lie so, or have several shapes.
        """
        if len(self._pieces) != 1:
            return None
        piece = self._pieces[0]
        parts = {part.tap: part for part in piece.share.parts}
        found = [parts.get(tap) for tap in taps]
        first = found[0]
        if first is None or first.form is not None:
            return None
        size = first.rows * first.width
        for i, part in enumerate(found):
            if (
                part is None
                or part.form is not None
                or (part.at, part.rows, part.width)
                != (
                    first.at + i * size,
                    first.rows,
                    first.width,
                )
            ):
                return None
        return piece.values[:most, first.at : first.at + len(found) * size].unflatten(1, (len(found), size))

    def steps_of(self, tap: int) -> list[torch.Tensor]:
        """Return what a tap read: a tensor [rows, columns] for each step in which it was open.

        A value of a program has its own shape and dtype.
        """
        return [one for values in self._values(tap) for one in values.unbind(0)]

    def stacked(self, tap: int, most: int | None = None) -> torch.Tensor | None:
        """Return the values of a tap as one tensor, [steps, rows, columns].

        It is None if the steps have several shapes, or if there is no step. It may be a view of all that the request read.

        Args:
            most: the steps to return; the engine runs a step more than a result has tokens.
        """
        found = self._values(tap)
        if len({one.shape[1:] for one in found}) != 1:
            return None
        return (torch.cat(found) if len(found) > 1 else found[0])[:most]

    def _values(self, tap: int) -> list[torch.Tensor]:  # [steps, rows, columns] of each piece
        return [
            _value(piece.values[:, part.at : part.at + part.rows * part.width], part)
            for piece in self._pieces
            for part in piece.share.parts
            if part.tap == tap
        ]


def _value(lines: torch.Tensor, part: Part) -> torch.Tensor:  # [steps, elements] -> [steps, ...]
    return lines.unflatten(1, (part.rows, part.width)) if part.form is None else unpacked(lines, *part.form)
