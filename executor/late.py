"""Writes that come too late: a value changed in place after the block had gone on from its location.

The model has used the value by then, and the change reaches nothing. That may be meant (the block works on its own copy) or
not, so the notebook is told, once for each block.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from executor.served import Served

_WATCHED = 64


class Late:
    """The values that a block was given last, at locations that it has left.

    Args:
        say: sends text to the notebook.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False
        self._given: deque[tuple[weakref.ref[torch.Tensor], int, str]] = deque(maxlen=_WATCHED)

    def leave(self, served: Served) -> None:
        """Watch the values of a location from now on."""
        if not self._said:
            self._given.extend((weakref.ref(value), value._version, served.location) for value in served.given())

    def look(self) -> None:
        """Tell the notebook if one of them was changed since."""
        for given, version, location in self._given:
            value = given()
            if value is not None and value._version != version:
                self._say(
                    f"note: the value of {location} was changed in place after the block had gone on from there, so the change "
                    "reached nothing; change it before asking for the next location, or work on a .clone()\n"
                )
                self._said = True
                self._given.clear()
                return
