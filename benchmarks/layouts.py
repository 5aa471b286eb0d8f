"""The layouts that a model is measured in: tensor-parallel ranks times pipeline stages."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One layout.

    Attributes:
        tensor: the tensor-parallel size.
        pipeline: the number of pipeline stages.
    """

    tensor: int
    pipeline: int = 1

    @classmethod
    def of(cls, text: str) -> Layout:
        """Return the layout of a command's text, as "4" for four ranks.

        "2x2" is two ranks in each of two stages.

        Raises:
            ValueError: the text is no layout.
        """
        found = re.fullmatch(r"([1-9]\d?)(?:x([1-9]\d?))?", text)
        if found is None:
            raise ValueError(f"{text} is no layout: write TENSOR, or TENSORxSTAGES")
        return cls(int(found[1]), int(found[2] or 1))

    @classmethod
    def named(cls, name: str) -> Layout:
        """Return the layout of a name: "TP 3", "PP 2" or "TP 2 × PP 2".

        Raises:
            ValueError: the name is no layout's.
        """
        parts = dict(re.findall(r"(TP|PP) ([1-9]\d?)(?= × |$)", name))
        layout = cls(int(parts.get("TP", 1)), int(parts.get("PP", 1)))
        if layout.name != name:
            raise ValueError(f"no layout is called {name!r}: write TP 2, PP 2 or TP 2 × PP 2")
        return layout

    @property
    def name(self) -> str:
        """What pages and reports call it."""
        if self.pipeline == 1:
            return f"TP {self.tensor}"
        return f"PP {self.pipeline}" if self.tensor == 1 else f"TP {self.tensor} × PP {self.pipeline}"

    @property
    def ranks(self) -> int:
        """How many processes hold a part of the model."""
        return self.tensor * self.pipeline

    @property
    def reporting(self) -> int:
        """The rank that is told what blocks saved: the first of the last stage."""
        return self.ranks - self.tensor

    def __str__(self) -> str:
        return f"{self.tensor}x{self.pipeline}" if self.pipeline > 1 else str(self.tensor)
