"""The layouts that a model is measured in: tensor-parallel ranks times pipeline stages."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One layout.

    Attributes:
        tensor: the tensor-parallel size.
        stages: pipeline stages.
    """

    tensor: int
    stages: int = 1

    @classmethod
    def of(cls, text: str) -> Layout:
        """Return the layout of a text: "4" is four ranks, "2x2" two ranks in each of two stages.

        Raises:
            ValueError: the text is no layout.
        """
        found = re.fullmatch(r"([1-9]\d?)(?:x([1-9]\d?))?", text)
        if found is None:
            raise ValueError(f"{text} is no layout: write TENSOR, or TENSORxSTAGES")
        return cls(int(found[1]), int(found[2] or 1))

    @property
    def ranks(self) -> int:
        """How many processes hold a part of the model."""
        return self.tensor * self.stages

    @property
    def name(self) -> str:
        """The layout in the names of cases."""
        return f"{self.tensor} ranks" + (f" x {self.stages} stages" if self.stages > 1 else "")

    def __str__(self) -> str:
        return f"{self.tensor}x{self.stages}" if self.stages > 1 else str(self.tensor)
