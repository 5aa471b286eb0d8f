"""Which tenants sit steps out: those that have had more of the engine's time than others for their weight."""

from __future__ import annotations

from collections import Counter

import pytest

from executor.core.fairness import Flow
from executor.core.step_shares import CREDIT_SECONDS, LEAD_SECONDS, StepShares

RED, BLUE = Flow("red", "s"), Flow("blue", "s")
FIXED = 0.005  # seconds of a step that has no rows


def step(shares: StepShares, rows: dict[Flow, int], blocks: dict[Flow, float]) -> tuple[set[str], float]:
    """Run a step of all tenants that are not over their share; return those in it, and its seconds.

    Args:
        rows: the rows of each tenant that has work, a millisecond each.
        blocks: the seconds that the blocks of each tenant take.
    """
    over = shares.over(rows)
    inside = [flow for flow in rows if flow.tenant not in over]
    assert inside, "nobody runs"
    spent = {flow.tenant: blocks.get(flow, 0.0) for flow in inside}
    seconds = FIXED + sum(rows[flow] for flow in inside) * 1e-3 + sum(spent.values())
    shares.charge({flow.tenant: rows[flow] for flow in inside}, seconds, spent)
    return {flow.tenant for flow in inside}, seconds


def test_a_tenant_that_comes_has_the_engine_to_itself_for_its_credit() -> None:
    shares = StepShares()
    for _ in range(50):
        assert step(shares, {RED: 48}, {RED: 0.1})[0] == {"red"}
    had = 0.0
    while (ran := step(shares, {RED: 48, BLUE: 1}, {RED: 0.1}))[0] == {"blue"}:
        had += ran[1]
    assert had == pytest.approx(CREDIT_SECONDS, abs=LEAD_SECONDS + 0.01)


def test_a_tenant_with_one_trace_now_and_then_never_waits_for_another() -> None:
    """Its credit comes again while others run; 80 ms of each second are less than its share."""
    shares = StepShares()
    for _ in range(20):
        for _ in range(6):
            step(shares, {RED: 48}, {RED: 0.1})
        for _ in range(8):
            assert step(shares, {RED: 48, BLUE: 1}, {RED: 0.1, BLUE: 0.004})[0] == {"blue"}


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_that_always_have_work_get_time_by_weight(weight: float) -> None:
    shares = StepShares()
    heavy = Flow("blue", "s", weight=weight)
    time: Counter[str] = Counter()
    for _ in range(4000):
        inside, _ = step(shares, {RED: 48, heavy: 1}, {RED: 0.1, heavy: 0.002})
        time["red"] += 0.148 * ("red" in inside)
        time["blue"] += 0.003 * ("blue" in inside)
        time["fixed"] += FIXED * ("red" not in inside)  # a step that blue has alone is all blue's
    assert (time["blue"] + time["fixed"]) / time["red"] == pytest.approx(weight, rel=0.1)


def test_tenants_of_equal_work_for_their_weight_share_all_steps() -> None:
    shares = StepShares()
    heavy = Flow("blue", "s", weight=2.0)
    inside = [step(shares, {RED: 2, heavy: 4}, {RED: 0.01, heavy: 0.02})[0] for _ in range(500)]
    assert inside[100:] == [{"red", "blue"}] * 400


def test_a_tenant_that_goes_and_comes_gets_no_second_credit() -> None:
    """Its traces follow one another at once: it gets its share and no more."""
    shares = StepShares()
    time: Counter[str] = Counter()
    for number in range(2000):
        inside, seconds = step(shares, {RED: 10, BLUE: 10} if number % 5 else {RED: 10}, {})
        if len(inside) == 1:
            time[inside.pop()] += seconds
        else:
            time.update({"red": seconds / 2, "blue": seconds / 2})
    assert time["blue"] <= time["red"] * 1.05 + CREDIT_SECONDS


def test_time_of_blocks_that_end_between_steps_counts() -> None:
    shares = StepShares()
    shares.over([RED, BLUE])
    shares.charge({"blue": 1}, 1.0, {"red": 0.9})
    assert shares.over([RED, BLUE]) == {"red"}


def test_tenants_that_went_are_forgotten() -> None:
    shares = StepShares()
    for number in range(5000):
        shares.over([RED, Flow(f"guest{number}", "s")])
        shares.charge({"red": 1, f"guest{number}": 1}, 0.01, {})
    assert len(shares._clocks) < 1100


def test_one_tenant_is_never_over() -> None:
    shares = StepShares()
    for _ in range(10):
        assert not shares.over([RED, Flow("red", "other")])
        shares.charge({"red": 1}, 100.0, {})
    assert not shares.over([])
