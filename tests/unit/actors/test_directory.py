"""The directory's own rules: how many sessions a tenant may have, also when it asks for many at once, and which give way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from actors import session_pool
from actors.allowance import Allowance, Allowances
from actors.archive import Kept
from actors.directory import Directory
from actors.protocol import ReplicaReport, SessionStats, Target, Terms, Work
from actors.quota_use import Cost, Demand
from actors.telemetry import metrics
from actors.telemetry.counts import Counted, Counts
from actors.telemetry.options import Options
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from serve_app.settings import SessionSettings


class Actor:
    """A session actor that answers when it may.

    Attributes:
        closed: how often each session was ended.
        counts: what it has counted.
        said: what is said of each session, by id.
        told: sessions that were told that a trace may run.
        heeded: sessions that were told of other terms.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed: dict[str, int] = {}
        self.counts = Counts()
        self.said: dict[str, SessionStats] = {}
        self.told: list[tuple[str, str]] = []
        self.heeded: list[tuple[str, Terms]] = []
        for name in ("open", "restore", "close", "stats", "leave_jobs", "prepare", "turn", "heed", "retire", "counted"):
            # Called at once and awaited later, as Ray's are.
            setattr(self, name, SimpleNamespace(remote=self._called(getattr(self, f"_{name}"))))

    @staticmethod
    def _called(method: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: asyncio.ensure_future(method(*args))  # type: ignore[arg-type]

    def says(self, session_id: str, idle: float, collected: bool = False) -> None:
        self.said[session_id] = SessionStats(idle, 0, Work(), 0, collected)

    async def _turn(self, session_id: str, key: str) -> None:
        self.told.append((session_id, key))

    async def _heed(self, session_id: str, terms: Terms) -> None:
        self.heeded.append((session_id, terms))

    async def _prepare(self, targets: list[Target], options: Options) -> None:
        pass

    async def _retire(self) -> Counted:
        return self.counts.take()

    async def _counted(self) -> Counted:
        return self.counts.take()

    async def _open(self, session_id: str, kept: bool, terms: Terms) -> None:
        self.says(session_id, 0.0)

    async def _restore(self, session_id: str, kept: Kept, terms: Terms) -> None:
        self.says(session_id, 5.0)

    async def _close(self, session_id: str) -> SessionStats | None:
        self.closed[session_id] = self.closed.get(session_id, 0) + 1
        await self.gate.wait()
        return self.said.pop(session_id, None)

    async def _stats(self) -> dict[str, SessionStats]:
        await self.gate.wait()
        return dict(self.said)

    async def _leave_jobs(self, session_id: str) -> bool:
        await self.gate.wait()
        return False


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    """The session actors that there are, in the order in which they started."""
    made: list[Actor] = []

    async def start(self: session_pool.SessionPool) -> Actor:
        made.append(Actor())
        return made[-1]

    monkeypatch.setattr(session_pool.SessionPool, "_ready_actor", start)
    monkeypatch.setattr("ray.kill", lambda actor: made.remove(actor) if actor in made else None)
    return made


@pytest.fixture
async def directory(actors: list[Actor]) -> Directory:
    return Directory(SessionSettings(max_per_tenant=2, max_sessions=3, wait_seconds=0, warm=1))


async def test_two_hundred_sessions_take_two_actors(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings())
    await asyncio.gather(*(directory.open("anonymous") for _ in range(200)))
    assert sorted(len(actor.said) for actor in actors) == [100, 100]
    assert (await directory.status([])).sessions == 200


async def test_another_actor_starts_when_all_are_full_and_ends_when_it_is_empty(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings(per_actor=2, warm=1))
    leases = [await directory.open("anonymous") for _ in range(5)]
    assert [len(actor.said) for actor in actors] == [2, 2, 1]
    for lease in leases:
        await directory.close(lease.session_id, "anonymous")
    assert (await directory.status([])).warm == 1
    while len(actors) > 1:  # actors tell what they counted before they end
        await asyncio.sleep(0.01)
    assert not actors[0].said


async def test_an_actor_that_ends_tells_what_it_counted(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings(per_actor=1, warm=1))
    leases = [await directory.open("anonymous") for _ in range(2)]
    for actor in actors:
        actor.counts.add(metrics.TRACES, "anonymous", "tiny", "trace", "done")
        actor.counts.add(metrics.TOKENS, "anonymous", "tiny", "generated", by=7)
    for lease in leases:
        await directory.close(lease.session_id, "anonymous")
    while len(actors) > 1:
        await asyncio.sleep(0.01)
    [row] = (await directory.used("")).rows
    assert (row.tenant, row.model, row.traces, row.generated_tokens) == ("anonymous", "tiny", 2, 14)
    assert not (await directory.used("other")).rows


async def test_a_session_that_cannot_be_opened_is_opened_in_another_actor(actors: list[Actor]) -> None:
    import ray

    directory = Directory(SessionSettings(warm=1))
    await directory.open("anonymous")
    dead = actors[0]

    async def died(*args: object) -> None:
        raise ray.exceptions.ActorDiedError

    dead.open.remote = died  # type: ignore[attr-defined]
    lease = await directory.open("anonymous")
    assert dead not in actors and lease.actor is actors[0]


async def test_the_sessions_of_an_actor_that_is_dead_go_on_in_others(actors: list[Actor]) -> None:
    """However many callers find out, each session goes on once, under its id."""
    import ray

    directory = Directory(SessionSettings(warm=2))
    leases = [await directory.open("anonymous") for _ in range(6)]
    dead, alive = actors

    async def died(*args: object) -> None:
        raise ray.exceptions.ActorDiedError

    dead.stats.remote = died  # type: ignore[attr-defined]
    mine = [lease for lease in leases if lease.actor is dead]
    assert len(mine) == 3
    calls = [directory.recover(mine[0].session_id, "anonymous", dead) for _ in range(2)]
    found = await asyncio.gather(*calls, directory._leases.stats())
    for _ in range(20):
        await asyncio.sleep(0)
    after = [await directory.find(lease.session_id, "anonymous") for lease in leases]
    assert all(lease is not None and lease.actor is not dead for lease in after)
    assert found[0] is not None and found[0] == found[1]
    assert dead not in actors and sum(len(actor.said) for actor in actors) == 6
    assert await directory.recover(mine[0].session_id, "anonymous", dead) == found[0], "too late"
    for lease in leases:
        await directory.close(lease.session_id, "anonymous")
    assert len(actors) == 2 and not any(actor.said for actor in actors)


async def test_sessions_that_are_being_opened_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: session_pool.SessionPool) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(session_pool.SessionPool, "_ready_actor", never)
    directory = Directory(SessionSettings(max_per_tenant=2, max_sessions=3, wait_seconds=0))
    opening = [asyncio.create_task(directory.open("greedy")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceFailure, match="greedy has 2 sessions open, the most a tenant may have") as caught:
        await directory.open("greedy")
    assert "sessions.max_per_tenant" in caught.value.failure.message
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED and caught.value.failure.retry_after > 0
    opening.append(asyncio.create_task(directory.open("other")))
    await asyncio.sleep(0)
    with pytest.raises(ServiceFailure, match="all 3 sessions of the service are taken.* sessions.max_sessions"):
        await directory.open("third")
    for task in opening:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert (await directory.status([])).sessions == 0
    again = asyncio.create_task(directory.open("greedy"))
    await asyncio.sleep(0)
    assert not again.done(), "who was given up counts no longer"
    again.cancel()


@pytest.mark.parametrize(
    ("idle", "collected", "gives_way"),
    [(3.0, True, True), (0.5, True, False), (59.0, False, False), (61.0, False, True), (math.inf, False, True)],
)
async def test_which_session_gives_way(
    directory: Directory, actors: list[Actor], idle: float, collected: bool, gives_way: bool
) -> None:
    """A session that only waits gives way, also with values to fetch after long; a busy session never."""
    waiting, busy = [await directory.open("mine") for _ in range(2)]
    actors[0].says(waiting.session_id, idle, collected)
    if gives_way:
        await directory.open("mine")
        assert await directory.find(waiting.session_id, "mine") is None
    else:
        with pytest.raises(ServiceFailure, match="mine has 2 sessions open") as caught:
            await directory.open("mine")
        assert 0 < caught.value.failure.retry_after <= 60
    assert await directory.find(busy.session_id, "mine") is busy


def reserving(**reserved: int) -> Allowances:
    return Allowances(tenants={name: Allowance(reserved_sessions=count) for name, count in reserved.items()})


async def test_what_is_reserved_for_others_is_not_taken(actors: list[Actor]) -> None:
    """Four greedy tenants at once, as many sessions as they get; then the small ones get their own."""
    directory = Directory(SessionSettings(max_per_tenant=100, max_sessions=20, wait_seconds=0, warm=1))
    tenants = {"a": 2, "b": 2, "c": 2, "d": 2, "small": 3, "late": 2}
    await directory.heartbeat([], directory._settings, reserving(**tenants))
    asking = [directory.open(name) for _ in range(20) for name in "abcd"]
    told = await asyncio.gather(*asking, return_exceptions=True)
    refused = [one for one in told if isinstance(one, ServiceFailure)]
    assert len(told) - len(refused) == 20 - 3 - 2
    assert "or reserved for other tenants (5)" in refused[-1].failure.message
    quota = refused[-1].failure.quota
    assert (quota.name, quota.limit, quota.used) == ("max_sessions", 20, 15) and refused[-1].failure.retry_after > 0
    for name, count in (("small", 3), ("late", 2)):
        for _ in range(count):
            await directory.open(name)
        with pytest.raises(ServiceFailure, match="all 20 sessions of the service are taken"):
            await directory.open(name)


async def test_a_session_within_a_reserve_does_not_give_way_to_other_tenants(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings(max_per_tenant=100, max_sessions=2, wait_seconds=0, warm=1))
    await directory.heartbeat([], directory._settings, reserving(small=1))
    small, greedy = await directory.open("small"), await directory.open("greedy")
    actors[0].says(small.session_id, 1000.0, True)
    with pytest.raises(ServiceFailure):
        await directory.open("greedy")
    assert await directory.find(small.session_id, "small") is small
    actors[0].says(greedy.session_id, 1000.0, True)
    await directory.open("other")
    assert await directory.find(greedy.session_id, "greedy") is None


async def test_a_quota_of_sessions_takes_the_place_of_the_usual_number(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings(max_per_tenant=2, max_sessions=9, wait_seconds=0, warm=1))
    quotas = Allowances(tenants={"red": Allowance(sessions=3), "blue": Allowance(sessions=1)})
    await directory.heartbeat([], directory._settings, quotas)
    for tenant, most in (("red", 3), ("blue", 1), ("green", 2)):
        for _ in range(most):
            await directory.open(tenant)
        with pytest.raises(ServiceFailure, match=f"{tenant} has {most} sessions open") as caught:
            await directory.open(tenant)
        assert caught.value.failure.quota.name == ("max_per_tenant" if tenant == "green" else "sessions")
    usage = {one.name: one for one in await directory.usage()}
    assert usage["red"].refused == {"sessions": 1} and [one.used for one in usage["red"].quotas] == [3]


async def test_a_session_owes_nothing_when_its_lease_has_ended(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings(warm=1))
    quotas = Allowances(tenants={"red": Allowance(running_traces=1, tokens_per_minute=100, stored_bytes=100)})
    await directory.heartbeat([], directory._settings, quotas)
    lease = await directory.open("red")
    assert await directory.admit(lease.session_id, "k.t", Demand(60, 50))
    assert not await directory.admit(lease.session_id, "k.u", Demand(30, 60))
    await directory.hold(lease.session_id, 90, 0, math.inf)
    await directory.settle("k.t", Cost(20, 0, 90))
    await asyncio.sleep(0)
    assert actors[0].told == [(lease.session_id, "k.u")]
    await directory.close(lease.session_id, "red")
    [red] = await directory.usage()
    assert red.traces_waiting == 0
    assert {one.name: round(one.used) for one in red.quotas} == {
        "running_traces": 0, "tokens_per_minute": 20, "stored_bytes": 0,
    }  # fmt: skip
    for call in (directory.admit(lease.session_id, "k.v", Demand(1, 1)), directory.hold(lease.session_id, 1, 0, 1.0)):
        with pytest.raises(ServiceFailure, match="the session has ended"):
            await call


async def test_a_dead_session_actor_owes_nothing_for_its_traces(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings(warm=2))
    quotas = Allowances(tenants={"red": Allowance(running_traces=1, tokens_per_minute=100)})
    await directory.heartbeat([], directory._settings, quotas)
    lease = await directory.open("red")
    assert await directory.admit(lease.session_id, "k.t", Demand(60, 0))
    again = await directory.recover(lease.session_id, "red", lease.actor)
    assert again is not None and again.actor is not lease.actor
    [red] = await directory.usage()
    assert [round(one.used) for one in red.quotas] == [0, 0]


async def test_sessions_hear_of_quotas_that_come_later(actors: list[Actor]) -> None:
    directory = Directory(SessionSettings(warm=1))
    lease = await directory.open("red")
    quotas = Allowances(tenants={"red": Allowance(running_traces=1)})
    for _ in range(2):
        await directory.heartbeat([], directory._settings, quotas)
    await asyncio.sleep(0)
    assert [(name, terms.counted) for name, terms in actors[0].heeded] == [(lease.session_id, True)]


async def test_opening_waits_for_a_session_that_gives_way(actors: list[Actor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.leases.LOOK_SECONDS", 0.001)
    directory = Directory(SessionSettings(max_per_tenant=1, wait_seconds=30))
    first = await directory.open("mine")
    opening = [asyncio.create_task(directory.open("mine")) for _ in range(2)]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in opening)
    await directory.close(first.session_id, "mine")
    second = await opening[0]
    await asyncio.sleep(0.02)
    assert not opening[1].done(), "first come, first served"
    await directory.close(second.session_id, "mine")
    await opening[1]


async def test_a_session_that_is_closed_twice_at_once_is_ended_once(directory: Directory, actors: list[Actor]) -> None:
    lease = await directory.open("mine")
    [actor] = actors
    actor.gate.clear()
    closing = [asyncio.create_task(directory.close(lease.session_id, "mine", keep_jobs=True)) for _ in range(3)]
    await asyncio.sleep(0.01)
    actor.gate.set()
    assert all(await asyncio.gather(*closing))
    assert actor.closed == {lease.session_id: 1}


async def test_two_who_want_the_place_of_one(directory: Directory, actors: list[Actor]) -> None:
    """The one that was idle is ended once, and one of them gets its place."""
    forgotten = await directory.open("one")
    await directory.open("one")
    await directory.open("two")
    [actor] = actors
    actor.says(forgotten.session_id, 1000.0)
    actor.gate.clear()
    asking = [asyncio.create_task(directory.open(name)) for name in ("three", "four")]
    await asyncio.sleep(0.01)
    actor.gate.set()
    got = await asyncio.gather(*asking, return_exceptions=True)
    assert sorted(type(one).__name__ for one in got) == ["Lease", "ServiceFailure"]
    assert actor.closed == {forgotten.session_id: 1} and (await directory.status([])).sessions == 3


async def test_a_lease_that_was_replaced_is_not_ended_in_place_of_the_new_one(
    directory: Directory, actors: list[Actor]
) -> None:
    old = await directory.open("mine")
    new = directory._leases._leases[old.session_id] = dataclasses.replace(old, actor=Actor())
    await directory._leases.end(old)
    assert await directory.find(old.session_id, "mine") is new and not actors[0].closed
    assert directory._leases.archive.of(old.session_id)


async def test_a_session_that_has_ended_gets_no_replica(directory: Directory, actors: list[Actor]) -> None:
    target = Target("app", "engine")
    model = SimpleNamespace(name="tiny")
    await directory.report(ReplicaReport(target, model, "r", "", True, running=0, waiting=0))
    lease = await directory.open("mine")
    assert (await directory.place(lease.session_id, target))[0] == "r"
    await directory.close(lease.session_id, "mine")
    assert (await directory.place(lease.session_id, target))[0] == ""
    assert not directory._board._placements
