"""The account alone: what is admitted, what is refused, and that nothing is owed for ever."""

from __future__ import annotations

import random

import pytest

from actors.account import Account
from actors.allowance import Allowance, Allowances
from actors.bucket import Bucket
from actors.quota_use import Cost, Demand, QuotaReached
from interpose.v1 import trace_pb2 as pb
from tests.unit.actors.local_account import Clock


class Accounts:
    """An account, its clock, and the traces that were told to run."""

    def __init__(self, **tenants: Allowance) -> None:
        self.clock = Clock()
        self.told: list[str] = []
        self.account = Account(lambda session_id, key: self.told.append(key), self.clock)
        self.account.allowances = Allowances(tenants=tenants)

    def admit(self, key: str, tokens: int = 0, tenant: str = "red", session: str = "s", stored: int = 0) -> bool:
        return self.account.admit(tenant, session, key, Demand(tokens, stored))

    def used(self, name: str, tenant: str = "red") -> float:
        return next(one.used for one in self.account.usage(tenant).quotas if one.name == name)


def test_a_bucket_refills_and_never_overflows() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(90)
    assert bucket.left == -30 and bucket.used == 90
    assert bucket.seconds_until(10) == pytest.approx(40)
    clock.now += 40
    assert bucket.left == pytest.approx(10)
    bucket.take(-100)
    assert bucket.left == 60
    clock.now += 1000
    assert bucket.left == 60


def test_another_quota_forgets_nothing_that_is_used() -> None:
    bucket = Bucket(100, Clock())
    bucket.take(70)
    bucket.limit(200)
    assert bucket.used == 70 and bucket.left == 130
    bucket.limit(None)
    assert bucket.used == 0 and bucket.seconds_until(5) == 0


def test_traces_wait_for_the_quota_and_more_are_refused() -> None:
    one = Accounts(red=Allowance(running_traces=2, waiting_traces=1))
    assert one.admit("a") and one.admit("b") and not one.admit("c")
    one.clock.now += 4
    with pytest.raises(
        QuotaReached, match=r"red has 2 traces running and 1 waiting.*quotas\.waiting_traces 1"
    ) as caught:
        one.admit("d")
    fact = caught.value.failure
    assert fact.code == pb.ERROR_CODE_QUOTA_EXCEEDED and fact.quota.name == "waiting_traces"
    assert (fact.quota.limit, fact.quota.used) == (1, 1) and fact.retry_after > 0
    assert one.admit("x", tenant="blue"), "another tenant's are counted apart"
    one.account.settle("a", Cost())
    assert one.told == ["c"] and not one.admit("d")
    assert one.account.usage("red").refused == {"waiting_traces": 1}


def test_the_seconds_of_a_refusal_follow_how_long_traces_take() -> None:
    one = Accounts(red=Allowance(running_traces=1, waiting_traces=0))
    for number in range(40):
        one.admit(f"t{number}")
        one.clock.now += 30
        one.account.settle(f"t{number}", Cost())
    one.admit("runs")
    with pytest.raises(QuotaReached) as caught:
        one.admit("more")
    assert caught.value.failure.retry_after == pytest.approx(30, rel=0.01)


def test_sessions_take_turns_in_the_wait() -> None:
    one = Accounts(red=Allowance(running_traces=1))
    for key in ("a1", "a2", "a3"):
        one.admit(key, session="a")
    one.admit("b1", session="b")
    for key in ("a1", "b1", "a2"):
        one.account.settle(key, Cost(1))
    assert one.told == ["b1", "a2", "a3"]


def test_a_trace_that_gives_up_waiting_owes_nothing() -> None:
    one = Accounts(red=Allowance(running_traces=1, waiting_traces=1, tokens_per_minute=100))
    one.admit("runs", 10)
    one.admit("waits", 10)
    one.account.settle("waits", Cost())
    assert one.account.usage("red").waiting == 0 and one.used("tokens_per_minute") == 10
    one.account.settle("runs", Cost(4))
    assert not one.told and one.used("tokens_per_minute") == 4


def test_tokens_are_charged_at_once_and_the_rest_comes_back() -> None:
    one = Accounts(red=Allowance(tokens_per_minute=120))
    one.admit("a", 100)
    with pytest.raises(QuotaReached, match=r"may need 40 tokens \(quotas\.tokens_per_minute 120, used 100\)") as caught:
        one.admit("b", 40)
    assert caught.value.failure.retry_after == pytest.approx(10)
    one.account.settle("a", Cost(tokens=30))
    assert one.used("tokens_per_minute") == pytest.approx(30) and one.admit("b", 40)
    one.account.settle("a", Cost(tokens=30))
    assert one.used("tokens_per_minute") == pytest.approx(70), "a trace settles once"


def test_after_the_seconds_of_the_refusal_the_trace_runs() -> None:
    one = Accounts(red=Allowance(tokens_per_minute=120))
    one.account.settle("x", Cost())
    one.admit("a", 120)
    for tokens in (1, 60, 120):
        with pytest.raises(QuotaReached) as caught:
            one.admit("b", tokens)
        one.clock.now += caught.value.failure.retry_after - 0.01 * (tokens > 1)
        if tokens > 1:
            with pytest.raises(QuotaReached):
                one.admit("b", tokens)
            one.clock.now += 0.011
        assert one.admit(f"b{tokens}", tokens)


def test_a_trace_that_may_need_more_than_the_quota_runs_alone_and_is_paid_afterwards() -> None:
    one = Accounts(red=Allowance(tokens_per_minute=60))
    assert one.admit("large", 500)
    with pytest.raises(QuotaReached):
        one.admit("small", 1)
    one.account.settle("large", Cost(tokens=90))
    with pytest.raises(QuotaReached) as caught:
        one.admit("small", 1)
    assert caught.value.failure.retry_after == pytest.approx(31)


def test_stored_bytes_are_those_of_all_sessions() -> None:
    one = Accounts(red=Allowance(stored_bytes=100))
    one.account.hold("red", "a", 60, 0, 50.0)
    with pytest.raises(QuotaReached, match=r"quotas\.stored_bytes 100, used 60") as caught:
        one.account.hold("red", "b", 41, 0, float("inf"))
    assert caught.value.failure.retry_after == pytest.approx(50)
    with pytest.raises(QuotaReached):
        one.admit("t", session="b", stored=41)
    assert one.admit("t", session="b", stored=40)
    one.account.hold("red", "a", 10, 0, float("inf"))
    one.account.hold("red", "b", 90, 0, float("inf"))
    one.account.gone("red", "a")
    assert one.used("stored_bytes") == 90
    one.account.gone("red", "b")
    assert one.used("stored_bytes") == 0 and one.account.usage("red").running == 0


def test_saved_bytes_are_waited_for_after_they_were_saved() -> None:
    one = Accounts(red=Allowance(saved_bytes_per_minute=60))
    one.admit("a")
    one.account.hold("red", "s", 100, 100, 0.0)  # of this minute's and the next one's
    with pytest.raises(QuotaReached, match="saves 30 bytes more"):
        one.account.hold("red", "s", 130, 30, 0.0)
    with pytest.raises(QuotaReached, match="has saved all bytes") as caught:
        one.admit("b")
    assert caught.value.failure.retry_after == pytest.approx(41)
    one.clock.now += 41
    assert one.admit("b")


def test_quotas_that_change_hold_at_once() -> None:
    one = Accounts(red=Allowance(running_traces=1))
    for key in "abc":
        one.admit(key)
    one.account.allowances = Allowances(tenants={"red": Allowance(running_traces=2)})
    assert one.told == ["b"]
    one.account.allowances = Allowances()
    assert one.told == ["b", "c"] and one.admit("d")


def test_a_trace_that_its_session_does_not_know_is_settled_after_two_looks() -> None:
    one = Accounts(red=Allowance(running_traces=3, tokens_per_minute=100))
    one.admit("known", 10)
    one.admit("lost", 10)
    one.admit("elsewhere", 10, session="unreachable")
    for _ in range(5):
        one.account.reconcile({"s": {"known"}}, {"s", "unreachable"})
    assert one.account.usage("red").running == 2 and one.used("tokens_per_minute") == 20
    one.account.reconcile({"s": {"known"}}, {"s"})
    one.account.reconcile({"s": {"known"}, "unreachable": {"elsewhere"}}, {"s", "unreachable"})
    one.account.reconcile({"s": {"known"}}, {"s"})
    assert one.account.usage("red").running == 2, "two looks in a row"
    one.account.reconcile({"s": {"known"}}, {"s"})
    assert one.account.usage("red").running == 1


def test_random_traces_leave_nothing() -> None:
    """The limits hold through all that happens to traces and sessions, and nothing is owed when all have ended."""
    draw = random.Random(23)
    one = Accounts(red=Allowance(running_traces=4, waiting_traces=3, tokens_per_minute=300, stored_bytes=1000))
    live: dict[str, str] = {}
    waits: list[float] = []
    for number in range(4000):
        session = f"s{draw.randrange(3)}"
        what = draw.random()
        one.clock.now += draw.random()
        if what < 0.5:
            try:
                one.admit(f"t{number}", draw.randrange(100), session=session, stored=draw.randrange(400))
                live[f"t{number}"] = session
            except QuotaReached as error:
                waits.append(error.failure.retry_after)
        elif what < 0.9 and live:
            key = draw.choice(sorted(live))
            del live[key]
            one.account.settle(key, Cost(draw.randrange(120), 0, draw.randrange(300)))
        elif what < 0.95:
            one.account.lost(session)
            live = {key: of for key, of in live.items() if of != session}
        else:
            one.account.gone("red", session)
            live = {key: of for key, of in live.items() if of != session}
        use = one.account.usage("red")
        assert use.running + use.waiting == len(live) and use.running == min(4, len(live)) and use.waiting <= 3
        assert one.used("stored_bytes") <= 1000 + 3 * 300
    assert min(waits) > 0
    for session in ("s0", "s1", "s2"):
        one.account.gone("red", session)
    one.clock.now += 1000
    use = one.account.usage("red")
    assert (use.running, use.waiting) == (0, 0) and all(quota.used == 0 for quota in use.quotas)
