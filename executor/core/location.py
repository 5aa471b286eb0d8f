"""The places in a generation that a block can wait for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Kind(enum.StrEnum):
    """The kinds of places that a block can wait for."""

    INPUT = "input"
    OUTPUT = "output"
    PATTERN = "pattern"
    STEP = "step"
    RESULT = "result"
    BARRIER = "barrier"


@dataclass(frozen=True)
class Location:
    """A place in the generation that a block can wait for.

    The place is a module's input or output in one step, the beginning of a step, or the result.

    Attributes:
        shown: the canonical name under which the block asked for the location, or "".
    """

    path: str
    kind: str
    step: int
    shown: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = self.shown or f"{self.path}.{self.kind}"
        return name + (f" (step {self.step})" if self.step else "")
