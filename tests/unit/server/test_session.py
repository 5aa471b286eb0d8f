"""A session actor's own rules, with an engine that is scripted: jobs, who comes back for what, how long, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable

import pytest

from actors.protocol import Order, Target
from actors.session import Session
from interpose.errors import ServiceFailure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb

OUTPUT = pb.Event(output=pb.Output(token_ids=[7, 8], prompt_token_ids=[1, 2, 3], finished=True))


class Engine:
    """Runs every trace as `script` says; counts them."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.last = OUTPUT

    async def run(self, target: Target, trace: pb.Trace) -> AsyncGenerator[pb.Event, None]:
        self.runs += 1
        self.begun.set()
        yield pb.Event(output=pb.Output(token_ids=[6]))
        await self.gate.wait()
        yield self.last


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    import time

    begun, passed = time.monotonic(), 0.0
    real = time.monotonic

    def pass_time(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(time, "monotonic", lambda: begun + (real() - begun) + passed)
    return pass_time


@pytest.fixture
async def engine() -> Engine:
    return Engine()


async def opened(engine: object, kept: bool) -> Session:
    """Return an open session whose traces run in a scripted engine; `kept` as in OpenSession."""
    made = Session("name", None, 600.0, 1 << 20, 900.0)
    made._engines = engine  # type: ignore[assignment]
    await made.open("s", kept)
    return made


@pytest.fixture
async def session(engine: Engine) -> Session:
    return await opened(engine, False)


def order(trace_id: str = "t", *, job: bool = True, session_id: str = "s", size: int = 10, remotes=()) -> Order:
    trace = pb.Trace(id=trace_id, model="x" * size)
    accepted = pb.Accepted(trace_id=trace_id, session_id=session_id, model="m", invokes=1)
    return Order(
        session_id, "f", trace_id, trace.SerializeToString(), accepted.SerializeToString(), Target("a", "d"), 1 << 30,
        job=job, keep=job, remotes=remotes,
    )  # fmt: skip


async def kinds(events: AsyncGenerator[bytes, None]) -> list[str]:
    return [str(pb.Event.FromString(data).WhichOneof("kind")) async for data in events]


async def ended(session: Session, trace_id: str = "t") -> service_pb2.JobStatus:
    with contextlib.suppress(ServiceFailure):
        await kinds(session.attach("s", trace_id, "waiting"))
    return await session.job("s", trace_id)


async def test_a_job_goes_on_when_everybody_has_gone(session: Session, engine: Engine) -> None:
    first = pb.Event.FromString(await session.start("s", order()))
    assert first.accepted.session_id == "s" and first.accepted.invokes == 1
    follower = asyncio.create_task(kinds(session.attach("s", "t", "f1")))
    await engine.begun.wait()
    await asyncio.sleep(0)
    follower.cancel()
    await session.leave("s", "t", "f1")
    status = await session.job("s", "t")
    assert status.state == service_pb2.JOB_STATE_RUNNING and status.generated_tokens == 1
    assert (await session.stats()).idle_seconds == 0
    engine.gate.set()
    assert await kinds(session.attach("s", "t", "f2")) == ["accepted", "output", "output", "done"]
    status = await session.job("s", "t")
    assert status.state == service_pb2.JOB_STATE_DONE and status.finished_invokes == 1
    assert (status.prompt_tokens, status.generated_tokens) == (3, 3)
    assert 590 < status.seconds_left <= 600 and status.seconds_since_ended > 0 and status.stored_bytes > 0
    await session.start("s", order())
    assert engine.runs == 1, "the same id again runs nothing"


async def test_a_trace_that_is_no_job_ends_with_its_client(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.session.RECONNECT_SECONDS", 0.0)
    events = session.run(order(job=False))
    await anext(events)
    await engine.begun.wait()
    await session.leave("s", "t", "f")
    status = await session.job("s", "t")
    assert status.state == service_pb2.JOB_STATE_CANCELLED and status.failure.code == pb.ERROR_CODE_CANCELLED


async def test_a_client_whose_connection_broke_comes_back_to_the_same_run(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.session.RECONNECT_SECONDS", 0.05)
    first = session.run(order(job=False))
    assert pb.Event.FromString(await anext(first)).HasField("accepted")
    await engine.begun.wait()
    leaving = asyncio.create_task(session.leave("s", "t", "f"))
    # By its id, with what it has left out; or as it was sent, by a client that does not know how far it came.
    attached = asyncio.create_task(kinds(session.attach("s", "t", "f2", 1)))
    await asyncio.sleep(0)
    again = dataclasses.replace(order(job=False), follower="f3")
    submitted = asyncio.create_task(kinds(session.run(again)))
    await leaving
    engine.gate.set()
    assert await attached == ["output", "output", "done"]
    assert await submitted == ["accepted", "output", "output", "done"]
    assert engine.runs == 1


async def test_a_job_that_is_cancelled(session: Session, engine: Engine) -> None:
    await session.start("s", order())
    assert (await session.job("s", "t")).state == service_pb2.JOB_STATE_QUEUED
    await engine.begun.wait()
    assert await session.cancel("s", "t") and not await session.cancel("s", "t")
    assert (await session.job("s", "t")).state == service_pb2.JOB_STATE_CANCELLED
    with pytest.raises(ServiceFailure, match="cancelled"):
        await kinds(session.attach("s", "t", "f"))
    assert not await session.cancel("s", "t", forget=True)
    with pytest.raises(ServiceFailure, match="any more"):
        await session.job("s", "t")
    assert not await session.cancel("s", "t", forget=True)


async def test_a_trace_that_is_cancelled_before_it_has_begun_to_run(session: Session, engine: Engine) -> None:
    """As when both calls come in one turn of the session's loop: whoever follows it must not wait for ever."""
    await session.start("s", order())
    assert await session.cancel("s", "t") and engine.runs == 0
    assert (await session.job("s", "t")).state == service_pb2.JOB_STATE_CANCELLED
    with pytest.raises(ServiceFailure, match="cancelled"):
        await asyncio.wait_for(kinds(session.attach("s", "t", "f")), 20)


async def test_a_job_of_which_an_invoke_failed(session: Session, engine: Engine) -> None:
    engine.last = pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_INTERVENTION, message="boom"))
    engine.gate.set()
    await session.start("s", order())
    status = await ended(session)
    assert status.state == service_pb2.JOB_STATE_FAILED and status.failure.message == "boom"


async def test_nothing_of_another_session_is_there(session: Session) -> None:
    await session.start("s", order())
    for call in (session.job("other", "t"), session.job("s", "other"), session.describe("other")):
        with pytest.raises(ServiceFailure) as caught:
            await call
        assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND
    with pytest.raises(ServiceFailure):
        await kinds(session.attach("s", "other", "f"))
    with pytest.raises(ServiceFailure, match="kept for 600 s after the trace has ended"):
        await session.start("s", order("t2", remotes=("blob",)))


async def test_a_client_that_leaves_leaves_its_jobs_until_their_time_is_over(
    session: Session, engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.gate.set()
    await session.start("s", order("job"))
    await kinds(session.run(order("trace", job=False)))
    assert await session.leave_jobs()
    assert [one.trace_id for one in (await session.describe("s")).traces] == ["job"]
    assert (await ended(session, "job")).state == service_pb2.JOB_STATE_DONE
    assert (await session.stats()).idle_seconds == 0
    clock(601)
    assert (await session.stats()).idle_seconds == math.inf, "it ends at once when nobody can come back for anything"


async def test_a_client_without_jobs_leaves_nothing(session: Session, engine: Engine) -> None:
    engine.gate.set()
    await kinds(session.run(order(job=False)))
    assert not await session.leave_jobs()
    assert (await session.describe("s")).stored_bytes == 0


async def test_a_kept_session_counts_from_its_last_use(
    session: Session, engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.gate.set()
    await session.open("s", True)
    await kinds(session.run(order(job=False)))
    for _ in range(3):
        clock(500)
        assert (await session.job("s", "t")).seconds_left > 599
    clock(500)
    assert (await session.stats()).idle_seconds == 0
    clock(101)
    assert 600 < (await session.stats()).idle_seconds < 700
    await session._sweep_once()
    with pytest.raises(ServiceFailure, match="kept for 600 s after the session was last used"):
        await session.job("s", "t")


async def test_room_is_made_of_what_nobody_comes_back_for(session: Session, engine: Engine) -> None:
    engine.gate.set()
    await kinds(session.run(order("old", job=False, size=600_000)))
    await session.start("s", order("job", size=600_000))
    assert [one.trace_id for one in (await session.describe("s")).traces] == ["job"], "the old trace gave way"
    await ended(session, "job")
    with pytest.raises(
        ServiceFailure, match=r"no room for .*; results of jobs .* go by themselves after 600 s"
    ) as caught:
        await session.start("s", order("more", size=600_000))
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
    with pytest.raises(ServiceFailure, match="save less, or close it"):
        await session.upload("s", "sha256:0", 600_000, 0, b"")
    assert (await session.job("s", "job")).state == service_pb2.JOB_STATE_DONE
