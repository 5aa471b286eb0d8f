"""The layouts that a model is measured in: tensor-parallel ranks times pipeline stages."""

from __future__ import annotations

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


LAYOUTS = [Layout(tensor, pipeline) for pipeline in (1, 2) for tensor in (1, 2, 4)]


def named(name: str) -> Layout:
    """Return the layout that the page calls so.

    Raises:
        ValueError: there is none.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(f"no layout is called {name!r}; there are {', '.join(layout.name for layout in LAYOUTS)}")
