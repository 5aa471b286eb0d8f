"""A session actor's own rules, with an engine that is scripted: jobs, who comes back for what, how long, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfDiskError

from actors.protocol import Route, Target, Terms
from actors.saved import Saved
from actors.session import Session
from interpose.contract.errors import ServiceFailure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import DTYPE_UINT8, Blob, Objects, RemoteTensor, Tensor, Value
from interpose.wire.request import TraceRequest
from tests.unit.actors.local_directory import LocalDirectory
from tests.unit.actors.reading import events_of

TERMS = Terms(600.0, 1 << 20, 900.0)
OUTPUT = pb.Event(output=pb.Output(token_ids=[7, 8], prompt_token_ids=[1, 2, 3], finished=True))


def saved_value(blob_id: str) -> Value:
    """A saved tensor of 8 bytes."""
    return Value(tensor=Tensor(dtype=DTYPE_UINT8, shape=[8], blob=Blob(id=blob_id, size=8)))


class Engine:
    """Runs every trace as `script` says; counts them."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.last = OUTPUT

    async def run(self, route: Route, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        self.runs += 1
        self.begun.set()
        yield pb.Event(output=pb.Output(token_ids=[6])).SerializeToString()
        await self.gate.wait()
        yield self.last.SerializeToString()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    import time

    passed = 0.0
    monotonic, of_day = time.monotonic, time.time

    def pass_time(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed)
    monkeypatch.setattr(time, "time", lambda: of_day() + passed)
    return pass_time


@pytest.fixture
async def engine() -> Engine:
    return Engine()


async def opened(engine: object, kept: bool, terms: Terms = TERMS) -> Session:
    """Return an open session whose traces run in a scripted engine; `kept` as in OpenSession."""
    made = Session(engine, LocalDirectory(kept), TERMS)  # type: ignore[arg-type]
    await made.open("s", kept, terms)
    return made


@pytest.fixture
async def session(engine: Engine) -> Session:
    return await opened(engine, False)


ROUTE = Route(Target("a", "d"))
Submission = tuple[TraceRequest, Route, dict[str, Saved]]


def submission(
    trace_id: str = "t", *, job: bool = True, session_id: str = "s", size: int = 10, remotes: tuple[str, ...] = ()
) -> Submission:
    """What the ingress hands to a session."""
    trace = pb.Trace(id=trace_id, model="x" * size)
    accepted = pb.Event(
        accepted=pb.Accepted(trace_id=trace_id, session_id=session_id, model="m", invokes=1)
    ).SerializeToString()
    request = TraceRequest(
        trace.SerializeToString(), session_id=session_id, trace_id=trace_id, accepted=accepted, max_saved_bytes=1 << 30,
        job=job, keep=job, remotes=remotes,
    )  # fmt: skip
    return request, ROUTE, {}


async def kinds(events: AsyncGenerator[bytes, None]) -> list[str]:
    return [str(event.WhichOneof("kind")) for event in await events_of(events)]


async def submitted(session: Session) -> asyncio.Task[bytes]:
    """A job that the session has taken, in the turn of its loop before it begins to run."""
    starting = asyncio.create_task(session.start("s", *submission()))
    await asyncio.sleep(0)
    return starting


async def ended(session: Session, trace_id: str = "t") -> service_pb2.JobStatus:
    with contextlib.suppress(ServiceFailure):
        await kinds(session.attach("s", trace_id, "waiting"))
    return await session.job("s", trace_id)


async def test_a_job_goes_on_when_everybody_has_gone(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.session.RECONNECT_SECONDS", 0.0)
    first = pb.Event.FromString(await session.start("s", *submission()))
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
    await session.start("s", *submission())
    assert engine.runs == 1, "the same id again runs nothing"


async def test_a_trace_that_is_no_job_ends_with_its_client(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.session.RECONNECT_SECONDS", 0.0)
    events = session.run(*submission(job=False), "f")
    await anext(events)
    await engine.begun.wait()
    await session.leave("s", "t", "f")
    status = await session.job("s", "t")
    assert status.state == service_pb2.JOB_STATE_CANCELLED and status.failure.code == pb.ERROR_CODE_CANCELLED


async def test_a_client_whose_connection_broke_comes_back_to_the_same_run(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.session.RECONNECT_SECONDS", 0.05)
    first = session.run(*submission(job=False), "f")
    assert pb.Event.FromString(await anext(first)).HasField("accepted")
    await engine.begun.wait()
    leaving = asyncio.create_task(session.leave("s", "t", "f"))
    # By its id, with what it has left out; or as it was sent, by a client that does not know how far it came.
    attached = asyncio.create_task(kinds(session.attach("s", "t", "f2", 1)))
    await asyncio.sleep(0)
    submitted = asyncio.create_task(kinds(session.run(*submission(job=False), "f3")))
    await leaving
    engine.gate.set()
    assert await attached == ["output", "output", "done"]
    assert await submitted == ["accepted", "output", "output", "done"]
    assert engine.runs == 1


async def test_a_job_that_is_cancelled(session: Session, engine: Engine) -> None:
    starting = await submitted(session)
    assert (await session.job("s", "t")).state == service_pb2.JOB_STATE_QUEUED
    await starting
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
    """As when both calls come in one turn of the session's loop: a reader that follows it must not wait for ever."""
    await submitted(session)
    assert await session.cancel("s", "t") and engine.runs == 0
    assert (await session.job("s", "t")).state == service_pb2.JOB_STATE_CANCELLED
    with pytest.raises(ServiceFailure, match="cancelled"):
        await asyncio.wait_for(kinds(session.attach("s", "t", "f")), 20)


async def test_a_job_of_which_an_invoke_failed(session: Session, engine: Engine) -> None:
    engine.last = pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_INTERVENTION, message="boom"))
    engine.gate.set()
    await session.start("s", *submission())
    status = await ended(session)
    assert status.state == service_pb2.JOB_STATE_FAILED and status.failure.message == "boom"


async def test_nothing_of_another_session_is_there(session: Session) -> None:
    await session.start("s", *submission())
    for call in (session.job("other", "t"), session.job("s", "other"), session.describe("other")):
        with pytest.raises(ServiceFailure) as caught:
            await call
        assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND
    with pytest.raises(ServiceFailure):
        await kinds(session.attach("s", "other", "f"))
    with pytest.raises(ServiceFailure, match="kept for 600 s after the trace has ended"):
        await session.start("s", *submission("t2", remotes=("blob",)))


async def test_a_client_that_leaves_leaves_its_jobs_until_their_time_is_over(
    session: Session, engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.gate.set()
    await session.start("s", *submission("job"))
    await kinds(session.run(*submission("trace", job=False), "f"))
    assert await session.leave_jobs()
    assert [one.trace_id for one in (await session.describe("s")).traces] == ["job"]
    assert (await ended(session, "job")).state == service_pb2.JOB_STATE_DONE
    assert (await session.stats()).idle_seconds == 0
    clock(601)
    assert (await session.stats()).idle_seconds == math.inf, "it ends at once when nobody can come back for anything"


async def test_a_client_without_jobs_leaves_nothing(session: Session, engine: Engine) -> None:
    engine.gate.set()
    await kinds(session.run(*submission(job=False), "f"))
    assert not await session.leave_jobs()
    assert (await session.describe("s")).stored_bytes == 0


async def test_a_kept_session_counts_from_its_last_use(
    session: Session, engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.gate.set()
    await session.open("s", True, TERMS)
    await kinds(session.run(*submission(job=False), "f"))
    for _ in range(3):
        clock(500)
        assert (await session.job("s", "t")).seconds_left > 599
    clock(500)
    assert (await session.stats()).idle_seconds == 0
    clock(101)
    assert 600 < (await session.stats()).idle_seconds < 700
    session.sweep()
    with pytest.raises(ServiceFailure, match="kept for 600 s after the session was last used"):
        await session.job("s", "t")


async def test_room_is_made_of_what_nobody_comes_back_for(session: Session, engine: Engine) -> None:
    engine.gate.set()
    await kinds(session.run(*submission("old", job=False, size=600_000), "f"))
    await session.start("s", *submission("job", size=600_000))
    assert [one.trace_id for one in (await session.describe("s")).traces] == ["job"], "the old trace gave way"
    await ended(session, "job")
    with pytest.raises(
        ServiceFailure, match=r"no room for .*; results of jobs .* go by themselves after 600 s"
    ) as caught:
        await session.start("s", *submission("more", size=600_000))
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
    with pytest.raises(ServiceFailure, match="save less, or close it"):
        await session.upload("s", "sha256:0", 600_000, 0, b"")
    assert (await session.job("s", "job")).state == service_pb2.JOB_STATE_DONE


async def test_traces_are_counted_however_little_they_keep(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.session_store.MAX_TRACES", 2)
    engine.gate.set()
    await kinds(session.run(*submission("old", job=False), "f"))
    for name in ("one", "two"):
        await session.start("s", *submission(name))
        await ended(session, name)
    assert [one.trace_id for one in (await session.describe("s")).traces] == ["one", "two"], "the old trace gave way"
    with pytest.raises(ServiceFailure, match="of 2 traces and may hold .* of 2") as caught:
        await session.start("s", *submission("more"))
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED


async def test_a_job_that_there_is_no_room_to_keep_has_not_begun(session: Session, engine: Engine) -> None:
    """Submitted again, it runs."""
    keep = session._directory.keep

    def full(*args: object) -> None:
        raise OutOfDiskError

    session._directory.keep = SimpleNamespace(remote=full)
    with pytest.raises(OutOfDiskError):
        await session.start("s", *submission())
    with pytest.raises(ServiceFailure, match="there is no trace t"):
        await session.job("s", "t")
    assert not session._store.by_key
    session._directory.keep = keep
    engine.gate.set()
    await session.start("s", *submission())
    assert (await ended(session)).state == service_pb2.JOB_STATE_DONE and engine.runs == 1


async def test_what_a_trace_ran_with_does_not_stay_with_it(session: Session, engine: Engine) -> None:
    """Others' values, which count with others, and the text of standing edits."""
    engine.gate.set()
    edit = pb.Edit(name="x" * 1000).SerializeToString()
    theirs = dataclasses.replace(submission()[0], edits=(edit,))
    await session.start("s", theirs, ROUTE, {"k/0/0": Saved("reference", 1 << 40)})
    during = (await session.stats()).stored_bytes
    await ended(session)
    assert during > 1000 > (await session.stats()).stored_bytes
    run = session._store.traces["t"]
    [kept] = session._directory.archive.of("s").traces.values()
    assert run.request.edits == kept.request.edits == ()
    assert not run.remotes


async def test_a_value_that_comes_twice_counts_once(session: Session, engine: Engine) -> None:
    await session.start("s", *submission())
    [key] = session._store.by_key
    before = (await session.stats()).stored_bytes
    for _ in range(2):
        await session.adopt(key, f"{key}/0/0", Saved("reference", 5000))
    assert (await session.stats()).stored_bytes == before + 5000


async def test_a_value_that_comes_late_from_an_invoke_that_failed_is_not_kept(session: Session, engine: Engine) -> None:
    engine.gate.set()
    gate = session._directory.keep.gate
    await session.start("s", *submission())
    [key] = session._store.by_key
    gate.clear()  # the trace is about to end
    await engine.begun.wait()
    while not session._store.traces["t"]._settling:
        await asyncio.sleep(0)
    await session.adopt(key, f"{key}/0/0", Saved("reference", 5000))
    gate.set()
    await ended(session)
    assert not session._store.traces["t"].arrivals.blobs


async def test_terms_are_those_of_the_lease(session: Session) -> None:
    await session.open("s", False, Terms(5.0, 100, 7.0))
    description = await session.describe("s")
    assert (description.max_stored_bytes, description.idle_seconds) == (100, 7.0)
    with pytest.raises(ServiceFailure, match="may hold 100"):
        await session.start("s", *submission(size=200))


async def test_a_session_is_collected_when_its_client_has_all_of_it(session: Session, engine: Engine) -> None:
    """Events read to their end, values fetched to theirs."""

    async def collected() -> bool:
        return (await session.stats()).collected

    assert await collected(), "nothing was ever in it"
    running = asyncio.create_task(kinds(session.run(*submission(job=False), "f")))
    await engine.begun.wait()
    [key] = session._store.by_key
    engine.last = pb.Event(saves=pb.Saves(objects=Objects(values=[saved_value(f"{key}/0/0")])))
    await session.adopt(key, f"{key}/0/0", Saved("reference", 8))
    assert not await collected(), "it runs"
    engine.gate.set()
    await running
    assert not await collected(), "a value has not been fetched"
    await session.fetched("s", f"{key}/0/0")
    assert await collected()
    await session.upload("s", "sha256:0", 8, 0, b"1234")
    assert await collected(), "what is uploaded is uploaded again"
    engine.last = OUTPUT
    await session.start("s", *submission("job"))
    await session._store.traces["job"].wait()
    assert not await collected(), "nobody has read what came of the job"


async def test_a_trace_whose_client_has_gone_is_not_collected(session: Session, engine: Engine) -> None:
    following = asyncio.create_task(kinds(session.run(*submission(job=False), "f")))
    await engine.begun.wait()
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    engine.gate.set()
    await session._store.traces["t"].wait()
    assert not (await session.stats()).collected, "its client may come back for it"
    await kinds(session.attach("s", "t", "f2", 2))
    assert (await session.stats()).collected


async def test_a_kept_session_is_never_collected(engine: Engine) -> None:
    assert not (await (await opened(engine, True)).stats()).collected


async def test_a_limit_that_a_block_has_reached_says_when_to_come_back(session: Session, engine: Engine) -> None:
    engine.last = pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_QUOTA_EXCEEDED, message="too much"))
    engine.gate.set()
    [failed] = [
        event.failed
        for event in await events_of(session.run(*submission(job=False), "f"))
        if event.WhichOneof("kind") == "failed"
    ]
    assert failed.retry_after > 0
    assert (await session.job("s", "t")).failure.retry_after > 0


async def test_values_that_a_trace_does_not_use_cannot_be_among_its_saves(session: Session, engine: Engine) -> None:
    """An engine whose block runs in a process of its own tells what that process says."""
    engine.last = pb.Event(saves=pb.Saves())
    engine.last.saves.names.add(name="x", value=Value(remote=RemoteTensor(blob_id="other/0/0", session_id="other")))
    engine.gate.set()
    with pytest.raises(ServiceFailure) as caught:
        await kinds(session.run(*submission(job=False), "f"))
    assert caught.value.failure.code == pb.ERROR_CODE_INTERVENTION
    assert "never had" in caught.value.failure.message


async def test_a_full_session_says_when_the_next_results_go(
    session: Session, engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.gate.set()
    await session.start("s", *submission("job", size=600_000))
    await ended(session, "job")
    clock(500)
    with pytest.raises(ServiceFailure) as caught:
        await session.start("s", *submission("more", size=600_000))
    assert 90 < caught.value.failure.retry_after <= 100


async def test_the_bytes_of_a_session_are_those_of_its_traces(engine: Engine) -> None:
    session = await opened(engine, False, Terms(600.0, 100_000, 900.0))
    store = session._store

    def told() -> bool:
        return store.stored_bytes() == sum(run.stored_bytes for run in store.traces.values()) > 0

    engine.gate.clear()
    running = asyncio.create_task(kinds(session.run(*submission("running", job=False, size=700), "f")))
    await engine.begun.wait()
    assert told()
    engine.gate.set()
    await running
    for number in range(12):
        await kinds(session.run(*submission(f"t{number}", job=False, size=20_000), "f"))
        assert told()
    assert "t0" not in store.traces and "t11" in store.traces, "old ones make room"
    assert await session.cancel("s", "t11", forget=True) is False
    assert told()
