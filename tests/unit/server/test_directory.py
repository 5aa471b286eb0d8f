"""The directory's own rules: how many sessions a tenant may have, also when it asks for many at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

from actors.directory import Directory
from actors.protocol import ReplicaReport, SessionStats, Target, Terms
from interpose.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from serve_app.settings import SessionSettings


async def test_sessions_that_are_being_opened_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Directory, "_refill", lambda self: None)  # no session actor is ever ready
    directory = Directory(SessionSettings(max_per_tenant=2, max_sessions=3))
    opening = [asyncio.create_task(directory.open("greedy")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceFailure, match="greedy has 2 sessions open, the most a tenant may have") as caught:
        await directory.open("greedy")
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED and caught.value.failure.retry_after > 0
    opening.append(asyncio.create_task(directory.open("other")))
    await asyncio.sleep(0)
    with pytest.raises(ServiceFailure, match="all 3 sessions of the service are taken"):
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


class Actor:
    """A session actor that answers when it may."""

    def __init__(self, idle: float = 0.0) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = 0
        self._idle = idle
        for name in ("open", "close", "stats", "leave_jobs"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _open(self, session_id: str, kept: bool, terms: Terms) -> None:
        if self.closed:
            self._idle = 0.0

    async def _close(self) -> SessionStats:
        self.closed += 1
        return await self._stats()

    async def _stats(self) -> SessionStats:
        await self.gate.wait()
        return SessionStats(self._idle, 0, 0, 0)

    async def _leave_jobs(self) -> bool:
        await self.gate.wait()
        return False


@pytest.fixture
async def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    monkeypatch.setattr(Directory, "_refill", lambda self: None)
    return Directory(SessionSettings(max_per_tenant=2, max_sessions=3))


async def test_a_session_that_is_closed_twice_at_once_is_lent_to_one(directory: Directory) -> None:
    actor = Actor()
    directory._warm.put_nowait(actor)
    lease = await directory.open("mine")
    actor.gate.clear()
    closing = [asyncio.create_task(directory.close(lease.session_id, "mine", keep_jobs=True)) for _ in range(3)]
    await asyncio.sleep(0)
    actor.gate.set()
    assert all(await asyncio.gather(*closing))
    assert actor.closed == 1 and directory._warm.qsize() == 1


async def test_two_who_want_the_place_of_one(directory: Directory) -> None:
    """The one that was idle is ended once, and one of them gets its place."""
    forgotten = Actor(idle=1000.0)
    for actor in (forgotten, Actor(), Actor()):
        directory._warm.put_nowait(actor)
    await directory.open("one")
    await directory.open("one")
    await directory.open("two")
    forgotten.gate.clear()
    asking = [asyncio.create_task(directory.open(name)) for name in ("three", "four")]
    await asyncio.sleep(0.01)
    forgotten.gate.set()
    got = await asyncio.gather(*asking, return_exceptions=True)
    assert sorted(type(one).__name__ for one in got) == ["Lease", "ServiceFailure"]
    assert forgotten.closed == 1 and (await directory.status([])).sessions == 3


async def test_a_lease_that_was_replaced_is_not_ended_in_place_of_the_new_one(directory: Directory) -> None:
    actor, other = Actor(), Actor()
    directory._warm.put_nowait(actor)
    old = await directory.open("mine")
    new = directory._leases[old.session_id] = dataclasses.replace(old, actor=other)
    await directory._end(old)
    assert await directory.find(old.session_id, "mine") is new and not actor.closed
    assert directory._archive.of(old.session_id)


async def test_a_session_that_has_ended_gets_no_replica(directory: Directory) -> None:
    target = Target("app", "engine")
    model = SimpleNamespace(name="tiny")
    await directory.report(ReplicaReport(target, model, "r", "", True, running=0, waiting=0))
    directory._warm.put_nowait(Actor())
    lease = await directory.open("mine")
    assert (await directory.place(lease.session_id, target))[0] == "r"
    await directory.close(lease.session_id, "mine")
    assert (await directory.place(lease.session_id, target))[0] == ""
    assert not directory._board._places
