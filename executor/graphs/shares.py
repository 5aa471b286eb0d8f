"""What a step leaves in the output of the tables: for each request a range, with its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """What a READ or a program leaves in its request's range of the output in a step.

    Attributes:
        tap: the number of the tap among the request's; the values of a program have the numbers after those of the taps.
        at: where it begins in the range, in elements.
        rows, width: its shape.
        form: of a program's value, which lies there as elements of the output: its own shape and dtype.
    """

    tap: int
    at: int
    rows: int
    width: int
    form: tuple[tuple[int, ...], torch.dtype] | None = None


@dataclass(frozen=True)
class Share:
    """A request's range of an area of the output.

    Attributes:
        start, size: in elements of the area.
        parts: what lies there.
    """

    start: int
    size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Outgoing:
    """What a step leaves in an area of the output.

    Attributes:
        version: differs when the shares differ.
        top: the number of elements of the area that hold all of it.
        shares: by the requests' slots.
    """

    version: int
    top: int
    shares: Mapping[int, Share]
