"""Plans for the lengths of prompts are made for lengths that come again."""

from __future__ import annotations

from typing import Any

import pytest

from executor.plan import cache
from executor.plan.refuse import Refused


class Made:
    """Stands for a plan: the cache asks a plan for nothing but whether it holds."""

    def holds(self, step: int) -> bool:
        return step == 0


def test_a_length_has_a_plan_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_LENGTHS", 2)
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
