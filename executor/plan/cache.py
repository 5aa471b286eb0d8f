"""Plans by what they were made for; the plan that was used longest ago goes first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from executor.plan.ir import Plan
from executor.plan.refuse import Refused

MOST_VARIANTS = 16
# A plan takes milliseconds, in which the engine waits. So a region has a plan for a prompt's length when the region has come with
# this length so many times; and for so many lengths at most.
SIGHTINGS, MOST_LENGTHS = 2, 64


class PlanCache:
    """The plans of one worker.

    Args:
        most: how many regions it holds.

    Attributes:
        made: how many plans were compiled.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._plans: OrderedDict[tuple[object, ...], list[Plan]] = OrderedDict()
        self._refused: OrderedDict[tuple[object, ...], Refused] = OrderedDict()
        self._lengths: OrderedDict[tuple[object, ...], Counter[int]] = OrderedDict()
        self.made = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: tuple[object, ...], step: int, make: Callable[[], Plan], line: int = 0) -> Plan:
        """Return the plan for a step, made if there is none whose guards hold.

        Args:
            key: the fingerprint of what the region reads, and whatever else the plan is made for.
            step: the step.
            make: compiles the plan.
            line: where the region begins, for messages.

        Raises:
            Refused: the region is no plan, now or when it was tried before; or it needs too many plans.
        """
        if key in self._refused:
            self._refused.move_to_end(key)
            raise self._refused[key]
        plans = self._plans.get(key)
        if plans is not None:
            self._plans.move_to_end(key)
            found = next((plan for plan in plans if plan.holds(step)), None)
            if found is not None:
                return found
        try:
            if plans is not None and len(plans) >= MOST_VARIANTS:
                raise Refused(
                    line,
                    f"the number of the step decides between more than {MOST_VARIANTS} programs",
                    "use the number in comparisons alone, or as a tensor",
                )
            made = make()
        except Refused as refused:
            if not refused.later:
                self._refused[key] = refused
                self._drop(self._refused)
            raise
        self.made += 1
        self._plans.setdefault(key, []).append(made)
        self._drop(self._plans)
        return made

    def of_prompt(self, key: tuple[object, ...], rows: int, make: Callable[[], Plan], line: int = 0) -> Plan:
        """Return the plan for the prompt's step with so many rows, as `get` does.

        Raises:
            Refused: as of `get`; or prompts of this length have not come often, or prompts of many lengths have.
        """
        lengths = self._lengths.setdefault(key, Counter())
        self._lengths.move_to_end(key)
        self._drop(self._lengths)
        room = sum(count >= SIGHTINGS for count in lengths.values()) < MOST_LENGTHS
        if room or lengths[rows] >= SIGHTINGS:
            lengths[rows] += 1
        if lengths[rows] < SIGHTINGS:
            raise Refused(line, "a prompt of a new length", "", later=True)
        return self.get((*key, rows), 0, make, line)

    def clear(self) -> None:
        """Forget everything, as when the model's modules change."""
        self._plans.clear()
        self._refused.clear()
        self._lengths.clear()

    def _drop(self, entries: OrderedDict[tuple[object, ...], Any]) -> None:
        while len(entries) > self._most:
            entries.popitem(last=False)
