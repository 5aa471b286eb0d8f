"""Collects the objects that blocks leave behind, at known times and within a budget.

The collection runs on the thread that can be interrupted.

A `__del__`, a weak reference's callback and the `finally` of a generator run whenever Python collects a cycle: in the middle of a
forward pass, in the next tenant's block, on any thread. So Python collects nothing by itself while a worker has traced requests.
The worker collects at the end of steps, and once more when the last trace has gone. What was there before the first trace, the
model and all modules, is left out of that, so that it takes microseconds.
"""

from __future__ import annotations

import gc
import logging
import re

from executor.block.budget import NOBODY, Budget
from executor.core.errors import BudgetExceeded

logger = logging.getLogger(__name__)

# What code that runs when an object goes is written with. A trace without these words may have some all the same.
_FINAL = re.compile(r"__del__|weakref|finalize")


def finalizes(source: str) -> bool:
    """Whether a text says that code runs when an object goes."""
    return _FINAL.search(source) is not None


class Garbage:
    """Collects what the blocks of one worker leave behind.

    Args:
        budget: bounds a collection.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._ours = False
        self._theirs = False  # whether blocks may have left objects since the last trace of all went

    def begin(self, here: bool) -> None:
        """A traced request has come: Python collects nothing by itself from now on. Idempotent.

        Args:
            here: whether its blocks run in this process, and so may leave objects in it.
        """
        self._theirs = self._theirs or here
        if not self._ours:
            self._ours = gc.isenabled()
            gc.disable()

    def look(self, requests: int = 1) -> None:
        """A step with traced requests is over: collect as much as Python would have.

        Args:
            requests: how many there are. Each of them may leave as much as Python would let a single request leave, since what
                the requests of a batch hold is looked at in vain.
        """
        counts, limits = gc.get_count(), gc.get_threshold()
        if not limits[0] or counts[0] <= limits[0] * max(1, requests):
            return
        self._collect(2 if counts[2] > limits[2] else 1 if counts[1] > limits[1] else 0)

    def end(self) -> None:
        """There is no traced request any more: Python collects again. Idempotent."""
        if self._ours:
            self._collect(2)
            self._ours = self._theirs = False
            gc.enable()

    def _collect(self, generation: int) -> None:
        if not self._theirs:  # the worker's own objects take the time that they take, and are not broken off
            gc.collect(generation)
            return
        try:
            self._budget.run(lambda: gc.collect(generation), 0.0, NOBODY)
        except BudgetExceeded:
            logger.warning("objects that blocks left behind ran code of their own for longer than a block may")
