"""Plans for the lengths of prompts are made for lengths that come again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from executor.plan import cache
from executor.plan.ir import Plan
from executor.plan.refuse import Refused


class Made:
    """Stands for a plan, of which the cache asks little."""

    def __init__(self, key: str = "", sized: bool = False) -> None:
        self.key, self.sized = key, sized

    def holds(self, step: int) -> bool:
        return step == 0


def test_a_length_has_a_plan_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_LENGTHS", 2)
    monkeypatch.setattr(cache, "MOST_ENDS", 0)
    plans, make = cache.PlanCache(), lambda: made[-1]
    made: list[Any] = [Made()]

    def ask(rows: int, key: str = "a") -> Any:
        return plans.of_prompt((key,), rows, make)

    for rows in (5, 6, 7):
        with pytest.raises(Refused, match="new length") as refused:
            ask(rows)
        assert refused.value.later
    first = ask(5)
    made.append(Made())
    assert ask(6) is not first and ask(5) is first
    with pytest.raises(Refused):
        ask(7)
    with pytest.raises(Refused):
        ask(5, "b")
    assert ask(5) is first and plans.made == 2


def test_the_shortest_and_the_longest_prompt_have_plans() -> None:
    plans = cache.PlanCache()

    def ask(rows: int, sized: bool = False) -> bool:
        try:
            plans.of_prompt(("a",), rows, lambda: cast(Plan, Made(f"{rows} rows", sized)))
        except Refused:
            return False
        return True

    assert not ask(20) and plans.around(("a",), 20) is None  # the first time that the region comes
    assert ask(30) and ask(10) and not ask(25)
    around = plans.around(("a",), 25)
    assert around is not None and [one.key for one in around] == ["10 rows", "30 rows"]
    assert plans.around(("a",), 30) is plans.around(("a",), 40) is plans.around(("b",), 25) is None
    plans.note_apart(*around)
    assert plans.around(("a",), 25) is None
    assert ask(25)  # the second time
    assert plans.around(("a",), 27) is not None and plans.around(("a",), 12) is not None
    assert ask(9, sized=True) and plans.around(("a",), 9) is None
    assert [ask(rows) for rows in (40, 50, 60, 70, 80, 90, 100)] == [True] * 5 + [False] * 2
    assert not ask(1)  # a prompt of one row is a step like others


def test_a_region_that_is_no_plan_is_not_tried_for_each_length() -> None:
    plans = cache.PlanCache()

    def make() -> Plan:
        raise Refused(1, "no plan", "")

    found = []
    for rows in (20, 30, 10, 40, 5):
        with pytest.raises(Refused) as refused:
            plans.of_prompt(("a",), rows, make)
        found.append(refused.value.later)
    assert found == [True, False, True, True, True]
