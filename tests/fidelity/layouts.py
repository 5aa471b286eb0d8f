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
    pipeline: int

    @property
    def name(self) -> str:
        """What the page calls it."""
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


ONE_RANK = Layout(1, 1)
LAYOUTS = [Layout(tensor, pipeline) for pipeline in (1, 2) for tensor in (1, 2, 4)]


def named(name: str) -> Layout:
    """Return the layout of this name: "TP 3", "PP 2" or "TP 2 × PP 2", as the page and the reports call layouts.

    Raises:
        ValueError: the name is no layout's.
    """
    parts = dict(re.findall(r"(TP|PP) ([1-9]\d?)(?= × |$)", name))
    layout = Layout(int(parts.get("TP", 1)), int(parts.get("PP", 1)))
    if layout.name != name:
        raise ValueError(
            f"no layout is called {name!r}; there are {', '.join(one.name for one in LAYOUTS)}, and others"
        )
    return layout
