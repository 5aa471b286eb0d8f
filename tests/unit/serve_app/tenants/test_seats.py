"""Which traces run on a replica at a time: tenants in turn, each a bounded share of the seats."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from executor.core.fairness import Flow, in_turn
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from serve_app.tenants.seats import Seats


class Traces:
    """Traces that run until they are told to end.

    Attributes:
        began: whose trace began, in that order.
    """

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self.began: list[str] = []
        self._ends: list[asyncio.Event] = []

    def submit(self, flow: Flow, count: int = 1) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._run(flow)) for _ in range(count)]

    async def _run(self, flow: Flow) -> None:
        async with self._seats.seat(flow):
            self.began.append(flow.session or flow.tenant)
            self._ends.append(asyncio.Event())
            await self._ends[-1].wait()

    async def settled(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self.settled()

    async def end_all(self, count: int) -> None:
        for number in range(count):
            await self.settled()
            self._ends[number].set()
        await self.settled()


RED, BLUE = Flow("red", share=0.75), Flow("blue", share=0.75)


async def test_a_tenant_with_two_hundred_jobs_does_not_keep_another_waiting() -> None:
    traces = Traces(Seats(8, 1024))
    traces.submit(RED, 200)
    await traces.settled()
    assert traces.began == ["red"] * 6, "its share"
    traces.submit(BLUE, 3)
    await traces.settled()
    assert traces.began[6:] == ["blue"] * 2
    await traces.end(0)
    assert traces.began[8:] == ["blue"], "the tenant of which the least runs is the first"
    await traces.end_all(203)
    assert len(traces.began) == 203


async def test_alone_a_tenant_may_have_all_seats_and_its_sessions_take_turns() -> None:
    traces = Traces(Seats(2, 1024))
    one, other = Flow("class", "one"), Flow("class", "other")
    traces.submit(one, 5)
    await traces.settled()
    traces.submit(other, 2)
    await traces.settled()
    assert traces.began == ["one", "one"]
    await traces.end_all(7)
    assert traces.began == ["one", "one", "other", "other", "one", "one", "one"], "until both have had two"


async def test_so_many_of_a_tenant_wait() -> None:
    seats = Seats(1, 2)
    traces = Traces(seats)
    traces.submit(RED, 3)
    await traces.settled()
    assert seats.waiting == 2
    with pytest.raises(
        ServiceFailure, match="2 traces of red wait for the engine already.*max_waiting_traces"
    ) as caught:
        async with seats.seat(RED):
            pass
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED and caught.value.failure.retry_after >= 1
    [last] = traces.submit(BLUE)
    await traces.settled()
    assert seats.waiting == 3, "another tenant's are counted apart"
    last.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await last
    assert seats.waiting == 2
    await traces.end_all(3)
    assert traces.began == ["red"] * 3 and seats.waiting == 0


async def test_one_that_is_given_up_as_its_turn_comes_leaves_its_seat() -> None:
    traces = Traces(Seats(1, 5))
    traces.submit(RED)
    await traces.settled()
    [given_up] = traces.submit(BLUE)
    [next_one] = traces.submit(Flow("green"))
    await traces.settled()
    traces._ends[0].set()
    await asyncio.sleep(0)
    given_up.cancel()
    await traces.settled()
    assert "green" in traces.began or not next_one.done()
    await traces.settled()
    assert traces.began[-1] == "green"


def test_in_turn() -> None:
    """By what runs of a tenant, then of a session, then as they came."""
    flows = [Flow("a", "1")] * 3 + [Flow("a", "2"), Flow("b", "3"), Flow("b", "3")]
    waiting = list(enumerate(flows))
    ordered = in_turn(waiting, lambda one: one[1], [Flow("b", "3")])
    assert [number for number, _ in ordered] == [0, 3, 4, 1, 5, 2]
    assert in_turn([], lambda one: one, []) == []


class Tokens:
    """Traces of a replica with one token for each running trace in each step.

    Attributes:
        had: tokens that each tenant has had.
    """

    def __init__(self, seats: int, **weights: float) -> None:
        self.had = dict.fromkeys(weights, 0)
        self._seats = Seats(seats, 1024)
        self._flows = {name: Flow(name, "s", 1.0, weight) for name, weight in weights.items()}
        self._step = asyncio.Condition()

    async def trace(self, tenant: str, asked: int, used: int) -> None:
        async with self._seats.seat(self._flows[tenant], asked) as seat:
            for _ in range(used):
                async with self._step:
                    await self._step.wait()
                self.had[tenant] += 1
            seat.used = used

    async def backlog(self, tenant: str, asked: int, used: int) -> None:
        """Keep twenty traces of a tenant waiting or running."""

        async def one() -> None:
            while True:
                await self.trace(tenant, asked, used)

        await asyncio.gather(*(one() for _ in range(20)))

    async def steps(self, count: int) -> None:
        for _ in range(count):
            for _ in range(6):
                await asyncio.sleep(0)
            async with self._step:
                self._step.notify_all()


@pytest.mark.parametrize("asked", [{}, {"one": 9, "two": 3, "four": 30}], ids=["as asked", "less than asked"])
async def test_tokens_follow_the_weights(asked: dict[str, int]) -> None:
    """Long and short traces, under overload: 1:2:4, also where traces ask for more tokens than they use."""
    tokens = Tokens(7, one=1.0, two=2.0, four=4.0)
    used = {"one": 9, "two": 3, "four": 15}
    tasks = [asyncio.create_task(tokens.backlog(name, asked.get(name, used[name]), used[name])) for name in used]
    await tokens.steps(2000)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    total = sum(tokens.had.values())
    assert [tokens.had[name] / total * 7 for name in used] == pytest.approx([1, 2, 4], rel=0.05)
    assert tokens._seats.waiting == 0 and tokens._seats._running.total() == 0


async def test_a_short_trace_comes_before_all_that_wait_of_a_tenant_with_long_ones() -> None:
    tokens = Tokens(2, long=1.0, short=1.0)
    greedy = asyncio.create_task(tokens.backlog("long", 50, 50))
    await tokens.steps(30)
    for _ in range(5):
        short = asyncio.create_task(tokens.trace("short", 2, 2))
        before = tokens.had["long"]
        while not short.done():
            await tokens.steps(1)
        assert tokens.had["long"] - before <= 2 * 53, "no longer than until a seat is free"
    greedy.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await greedy


async def test_many_that_give_up_at_once_leave_no_seat_taken() -> None:
    seats = Seats(2, 1024)
    traces = Traces(seats)
    running = traces.submit(RED, 2)
    await traces.settled()
    waiting = [task for flow in (RED, BLUE) for task in traces.submit(flow, 20)]
    await traces.settled()
    for task in [*running, *waiting[::2]]:
        task.cancel()
    await traces.settled()
    assert len(traces.began) == 4
    for task in waiting:
        task.cancel()
    await traces.settled()
    assert seats.waiting == 0 and not seats._running and not seats._queues


def test_in_turn_by_weight() -> None:
    heavy, light = Flow("heavy", weight=3.0), Flow("light")
    ordered = in_turn([heavy] * 6 + [light] * 2, lambda flow: flow, [])
    assert [flow.tenant[0] for flow in ordered] == ["h", "l", "h", "h", "h", "l", "h", "h"]
