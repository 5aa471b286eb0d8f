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
# Of a region that has come so many times, plans for a shorter and a longer prompt may do for all lengths between them. So the
# shortest or the longest prompt so far has a plan at once, but so many times at most.
MOST_ENDS = 8
_MOST_NOTES = 1024


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
        self._ends: dict[tuple[object, ...], int] = {}  # how many plans were made for the ends
        self._apart: dict[tuple[str, str], None] = {}  # plans that say nothing of the lengths between theirs
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
        if len(self._ends) > self._most:
            self._ends = {one: made for one, made in self._ends.items() if one in self._lengths}
        room = sum(count >= SIGHTINGS for count in lengths.values()) < MOST_LENGTHS
        if room or lengths[rows] >= SIGHTINGS:
            lengths[rows] += 1
        if lengths[rows] < SIGHTINGS and not self._is_end(key, rows):
            raise Refused(line, "a prompt of a new length", "", later=True)
        return self.get((*key, rows), 0, make, line)

    def _is_end(self, key: tuple[object, ...], rows: int) -> bool:
        """Return whether a prompt has a plan because it is the shortest or longest so far."""
        made, lengths = self._ends.get(key, 0), self._lengths[key]
        if rows < 2 or made >= MOST_ENDS or sum(lengths.values()) < SIGHTINGS:
            return False
        planned = [one for one in lengths if one > 1 and (*key, one) in self._plans]
        if any((*key, one) in self._refused for one in lengths) or (planned and min(planned) < rows < max(planned)):
            return False
        self._ends[key] = made + 1
        return True

    def around(self, key: tuple[object, ...], rows: int) -> tuple[Plan, Plan] | None:
        """Return the plans for the next shorter and the next longer prompt that have one.

        Args:
            key: as of `of_prompt`.
            rows: of the prompt.

        Returns:
            The two; None if there is a plan for the length itself, or if no others are, or none that tell.
        """
        lengths = self._lengths.get(key, ())
        planned = sorted(one for one in lengths if one > 1 and (*key, one) in self._plans)
        low, high = [one for one in planned if one < rows], [one for one in planned if one > rows]
        if rows in planned or not low or not high:
            return None
        one, other = self._plans[(*key, low[-1])][0], self._plans[(*key, high[0])][0]
        return None if one.sized or other.sized or (one.key, other.key) in self._apart else (one, other)

    def note_apart(self, one: Plan, other: Plan) -> None:
        """Note that the plans for two lengths say nothing of the lengths between them."""
        self._apart[one.key, other.key] = None
        if len(self._apart) > _MOST_NOTES:
            del self._apart[next(iter(self._apart))]

    def clear(self) -> None:
        """Forget everything, as when the model's modules change."""
        self._plans.clear()
        self._refused.clear()
        self._lengths.clear()
        self._ends.clear()

    def _drop(self, entries: OrderedDict[tuple[object, ...], Any]) -> None:
        while len(entries) > self._most:
            entries.popitem(last=False)
