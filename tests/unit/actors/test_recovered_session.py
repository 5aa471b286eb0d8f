"""A session whose actor dies goes on in another one: what had ended is there, what ran has failed and may run again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from actors.saved import Saved
from actors.session import Session
from interpose.contract.errors import ServiceFailure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import DTYPE_UINT8, Blob, Objects, Tensor, Value
from interpose.wire.events import apart, kind_of
from tests.unit.actors import test_variables as variables
from tests.unit.actors.reading import events_of
from tests.unit.actors.test_session import TERMS, Engine, clock, ended, kinds, opened, submission

__all__ = ["clock"]


@pytest.fixture
async def engine() -> Engine:
    made = Engine()
    made.gate.set()
    return made


async def recovered(session: Session) -> Session:
    """Return another actor that has taken over what one had said."""
    other = await opened(session._engines, session._store.kept)
    other._directory = other._store._directory = session._directory
    await other.restore("s", session._directory.archive.of("s"), TERMS)
    return other


def saving(session: Session, engine: Engine) -> None:
    """Have each trace save a tensor of 8 bytes."""
    run = engine.run

    async def script(route, request):
        async for event in run(route, request):
            if pb.Event.FromString(event).output.finished:
                blob_id = f"{request.key}/0/0"
                saved = Value(tensor=Tensor(dtype=DTYPE_UINT8, shape=[8], blob=Blob(id=blob_id, size=8)))
                yield pb.Event(saves=pb.Saves(objects=Objects(values=[saved]))).SerializeToString()
                await session.adopt(request.key, blob_id, Saved(f"reference to {blob_id}", 8))
            yield event

    engine.run = script  # type: ignore[method-assign]


async def test_a_job_that_has_ended(engine: Engine, clock: Callable[[float], None]) -> None:
    session = await opened(engine, False)
    saving(session, engine)
    await session.start("s", *submission())
    events = await events_of(session.attach("s", "t", "f"))
    before = await session.job("s", "t")
    [key] = session._store.by_key
    clock(100)
    other = await recovered(session)
    after = await other.job("s", "t")
    assert after.state == service_pb2.JOB_STATE_DONE and after.stored_bytes == before.stored_bytes > 8
    assert after.generated_tokens == before.generated_tokens and 490 < after.seconds_left < 501
    assert await events_of(other.attach("s", "t", "f")) == events
    assert await other.blob_ref("s", f"{key}/0/0") == [f"reference to {key}/0/0"]
    await other.start("s", *submission())
    assert engine.runs == 1, "it ran; the same id again runs nothing"
    assert (await other.stats()).done.traces == 1
    clock(501)
    other.sweep()
    assert not session._directory.archive.of("s").traces


async def test_times_are_those_of_the_new_clock(engine: Engine) -> None:
    """Another machine's monotonic clock has begun elsewhere."""
    session = await opened(engine, False)
    await session.start("s", *submission())
    await ended(session)
    kept = session._directory.archive.of("s")
    [(key, one)] = kept.traces.items()
    one.progress.move(-5000)
    kept.traces[key] = dataclasses.replace(one, clock=one.clock + 5000)
    status = await (await recovered(session)).job("s", "t")
    assert 590 < status.seconds_left < 601 and 0 < status.seconds_since_submitted < 10


async def test_a_job_that_ran(engine: Engine) -> None:
    engine.gate.clear()
    session = await opened(engine, False)
    await session.start("s", *submission())
    await engine.begun.wait()
    other = await recovered(session)
    status = await other.job("s", "t")
    assert status.state == service_pb2.JOB_STATE_FAILED and status.failure.code == pb.ERROR_CODE_UNAVAILABLE
    assert status.failure.retry_after > 0
    with pytest.raises(ServiceFailure, match="run it again"):
        await kinds(other.attach("s", "t", "f"))
    engine.gate.set()
    await other.start("s", *submission())
    assert (await ended(other)).state == service_pb2.JOB_STATE_DONE and engine.runs == 2


async def test_a_job_that_was_cancelled(engine: Engine) -> None:
    engine.gate.clear()
    session = await opened(engine, False)
    await session.start("s", *submission())
    assert await session.cancel("s", "t")
    assert (await (await recovered(session)).job("s", "t")).state == service_pb2.JOB_STATE_CANCELLED


async def test_nobody_hears_that_a_trace_is_done_before_it_is_kept(engine: Engine) -> None:
    session = await opened(engine, True)
    keep = session._directory.keep
    keep.gate.clear()
    told: list[str] = []

    async def follow() -> None:
        async for data in session.run(*submission(job=False), "f"):
            told.extend(kind_of(event) for event in apart(data))

    following = asyncio.create_task(follow())
    while len(told) < 3:
        await asyncio.sleep(0)
    assert told == ["accepted", "output", "output"]
    cancelling = asyncio.create_task(session.cancel("s", "t"))
    await asyncio.sleep(0.01)
    assert not cancelling.done() and not following.done(), "too late to cancel it"
    keep.gate.set()
    await asyncio.gather(following, cancelling)
    assert told[3:] == ["done"]
    assert (await (await recovered(session)).job("s", "t")).state == service_pb2.JOB_STATE_DONE


async def test_what_nobody_can_ask_for_is_not_kept(engine: Engine) -> None:
    session = await opened(engine, False)
    await kinds(session.run(*submission(job=False), "f"))
    assert not session._directory.archive.of("s").traces
    saving(session, engine)
    await kinds(session.run(*submission("saves", job=False), "f"))
    [kept] = session._directory.archive.of("s").traces.values()
    assert kept.request.trace_id == "saves"
    await session.cancel("s", "saves", forget=True)
    assert not session._directory.archive.of("s").traces


async def test_variables(clock: Callable[[float], None]) -> None:
    engine = variables.Engine()
    session = await opened(engine, True)
    await kinds(session.run(*variables.submission("first", items=(1,), job=False), "f"))
    other = await recovered(session)
    await kinds(other.run(*variables.submission("second", version=1, canonical=True, job=False), "f"))
    assert engine.seen == [[1], [1, "first"]]
    again = await recovered(other)
    await kinds(again.run(*variables.submission("third", version=2, canonical=True, job=False), "f"))
    assert engine.seen[2] == [1, "first", "second"]
    clock(700)
    again.sweep()
    kept = session._directory.archive.of("s")
    assert not kept.traces and not kept.variables


async def test_a_session_that_its_client_had_left(engine: Engine) -> None:
    session = await opened(engine, False)
    await session.start("s", *submission())
    await ended(session)
    assert await session.leave_jobs()
    session._directory.archive.leave("s")
    assert (await recovered(session))._left
    session._directory.archive.end("s")
    await session.cancel("s", "t", forget=True)  # comes too late to matter
