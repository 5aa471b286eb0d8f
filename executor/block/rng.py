"""The random generators as one trace sees them, the same on every rank."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


class RandomState:
    """A trace's own state of the process's random generators.

    Args:
        seed: where they start.
    """

    def __init__(self, seed: int) -> None:
        outside = self._take()
        random.seed(seed)
        numpy.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)
        self._mine = self._take()
        self._put(outside)
        self._outside = outside

    @staticmethod
    def _take() -> tuple[Any, ...]:
        # A device that nobody uses has no state to keep; whether there is one takes as long to find out as all of the rest.
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda

    @staticmethod
    def _put(state: tuple[Any, ...]) -> None:
        random.setstate(state[0])
        numpy.random.set_state(state[1])
        torch.set_rng_state(state[2])
        if state[3] is not None:
            torch.cuda.set_rng_state(state[3])

    def enter(self) -> None:
        """Make the trace's generators the process's."""
        self._outside = self._take()
        self._put(self._mine)

    def leave(self) -> None:
        """Give the process its own generators back."""
        self._mine = self._take()
        self._put(self._outside)
