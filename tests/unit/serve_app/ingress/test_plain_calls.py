"""Plain requests beside a session: quotas, turns, lists, cancels and losses are those of any trace, and nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors import caller_watch
from actors.protocol import Lease, Route, Terms
from actors.session import Session
from actors.telemetry import metrics
from actors.telemetry.telemetry import Telemetry
from interpose.contract.errors import ServiceFailure
from interpose.v1 import operator_pb2, service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart, bundles
from interpose.wire.request import TraceRequest
from serve_app.ingress.plain_calls import PlainCalls
from serve_app.ingress.sessions import SessionCalls
from tests.unit.actors.local_account import ROUTE, LocalAccount, submission

PIECE = pb.Event(http=pb.Http(status=200, content_type="text/event-stream", data=b"data: 1\n\n"))
LAST = pb.Event(output=pb.Output(prompt_token_ids=[1, 2], token_ids=[6, 7, 8], finished=True))
CODE = pb.ErrorCode


class Engine:
    """Yields a piece of an answer, waits for its gate, and ends as the test says.

    Attributes:
        running: requests that run.
        begun: requests that have begun.
        ends: what comes last: an event, or an error.
    """

    def __init__(self) -> None:
        self.gate, self.began = asyncio.Event(), asyncio.Event()
        self.running = self.begun = 0
        self.ends: pb.Event | Exception = LAST
        self.directory: Any = None

    async def run(self, route: Route, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        assert request.session == "serve/ingress" and request.key.endswith(f".{request.trace_id}")
        self.running += 1
        self.begun += 1
        self.began.set()
        try:
            yield PIECE.SerializeToString()
            await self.gate.wait()
            if isinstance(self.ends, Exception):
                raise self.ends
            for data in bundles([PIECE.SerializeToString(), self.ends.SerializeToString()]):
                yield data
            await asyncio.sleep(0)  # the end of the call comes after its last event
        finally:
            self.running -= 1


class Actor:
    """A session actor, whose calls begin a moment later."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.ask = self
        self.dead = False

    def remote(self, session_id: str, method: str, *args: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._asked(session_id, method, args))

    async def _asked(self, session_id: str, method: str, args: tuple[Any, ...]) -> Any:
        await asyncio.sleep(0)
        return await getattr(self._session, method)(session_id, *args)


class Place:
    """A session of the tenant "red", an engine, and the ingress between them."""

    def __init__(self, red: LocalAccount, session: Session) -> None:
        self.red = red
        self.session = session
        self.engine = Engine()
        self.lease = Lease("s", "red", Actor(session))
        self.calls = PlainCalls(SessionCalls(red), "serve/ingress")  # type: ignore[arg-type]
        self.calls._engines = self.engine  # type: ignore[assignment]

    async def run(self, name: str, tokens: int = 10, counted: bool = True) -> list[str]:
        """Run a request to its end; return the kinds of its events."""
        request = dataclasses.replace(submission(name, tokens=tokens, job=False)[0], tenant="red", method="openai")
        found: list[str] = []
        async with contextlib.aclosing(self.calls.run(self.lease, request, ROUTE, counted)) as events:
            async for one in events:
                found += [str(pb.Event.FromString(data).WhichOneof("kind")) for data in apart(one.SerializeToString())]
        return found

    def begin(self, name: str, **options: Any) -> asyncio.Task[list[str]]:
        return asyncio.create_task(self.run(name, **options))

    async def quiet(self) -> None:
        """Nothing of any request is left: in the engine, the session, the account and the ingress."""
        await self.red.settled()
        assert not self.engine.running and not self.calls._tails and not self.session._plain._running
        assert not self.session._store.traces and not self.session._store.running()
        stats = await self.session.stats()
        assert not stats.owing and not stats.traces_running and not stats.stored_bytes
        usage = self.red.account.usage("red")
        assert (usage.running, usage.waiting) == (0, 0)


async def made(counted: bool, **quotas: int) -> Place:
    red = LocalAccount(**quotas)
    session = await red.open("s")
    if not counted:
        await session.open("s", False, Terms(600.0, 1 << 20, 900.0))
    return Place(red, session)


@pytest.fixture(autouse=True)
def gone(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ingresses that are gone."""
    names: set[str] = set()
    monkeypatch.setattr(caller_watch, "_exists", lambda caller: caller not in names)
    return names


@pytest.mark.parametrize("counted", [False, True])
async def test_a_request_is_counted_as_a_trace_is(counted: bool) -> None:
    place = await made(counted, tokens_per_minute=1000)
    telemetry = place.session._telemetry = Telemetry("session")
    running = place.begin("t", counted=counted)
    await place.red.settled()
    [row] = place.session.rows()
    assert (row.tenant, row.method, row.followed) == ("red", "openai", True)
    assert row.status.state == service_pb2.JOB_STATE_RUNNING
    assert (await place.session.stats()).traces_running == 1
    place.engine.gate.set()
    assert await running == ["http", "http", "output"]
    if counted:  # the account knows before the client does
        assert place.red.used("tokens_per_minute") == 5 and not place.session._store.traces
    await place.quiet()
    done = (await place.session.stats()).done
    assert (done.traces, done.tokens) == (1, 5)
    added = telemetry.take().added
    assert added[metrics.TRACES.name, ("red", "m", "openai", "done")] == 1
    assert added[metrics.TOKENS.name, ("red", "m", "generated")] == 3


async def test_a_request_beyond_a_quota_reaches_no_engine() -> None:
    place = await made(True, tokens_per_minute=100)
    first = place.begin("first", tokens=100)
    await place.red.settled()
    with pytest.raises(ServiceFailure) as caught:
        await place.run("t", tokens=10)
    assert caught.value.failure.quota.name == "tokens_per_minute" and place.engine.begun == 1
    place.engine.gate.set()
    await first
    await place.quiet()


async def test_requests_wait_for_their_turn_and_each_gets_one() -> None:
    place = await made(True, running_traces=2, waiting_traces=3)
    tasks = [place.begin(f"t{number}") for number in range(7)]
    await place.red.settled()
    assert place.engine.begun == 2
    refused = [task for task in tasks if task.done()]
    assert len(refused) == 2 and all(isinstance(task.exception(), ServiceFailure) for task in refused)
    tasks[-3 if tasks[-3] not in refused else 2].cancel()  # a client that goes while its request waits
    place.engine.gate.set()
    await asyncio.wait(tasks)
    ended = [task for task in tasks if not task.cancelled() and task not in refused]
    assert len(ended) == 4 and all(task.result()[-1] == "output" for task in ended)
    assert place.engine.begun == 4
    await place.quiet()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_client_that_goes_ends_its_request(counted: bool, at_once: bool) -> None:
    place = await made(counted, tokens_per_minute=1000)
    running = place.begin("t", counted=counted)
    if at_once:
        await asyncio.sleep(0)
    else:
        await place.red.settled()
        assert place.engine.running == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.15)  # the end may overtake the request, and looks for it again
    await place.quiet()


@pytest.mark.parametrize("counted", [False, True])
async def test_an_operator_cancels_a_request(counted: bool) -> None:
    place = await made(counted, running_traces=2)
    running = place.begin("t", counted=counted)
    await place.red.settled()
    row: operator_pb2.TraceRow = place.session.rows()[0]
    assert await place.session.cancel_key(row.key)
    with pytest.raises(ServiceFailure) as caught:
        await running
    assert caught.value.failure.code == CODE.ERROR_CODE_CANCELLED
    await place.quiet()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("how", ["the engine dies", "the engine fails", "the session ends"])
async def test_a_part_that_is_lost_is_an_error(counted: bool, how: str) -> None:
    place = await made(counted, running_traces=2)
    if how == "the engine dies":
        place.engine.ends = ActorDiedError()
    elif how == "the engine fails":
        place.engine.ends = pb.Event(failed=pb.Failure(code=CODE.ERROR_CODE_UNAVAILABLE, message="stopped"))
    running = place.begin("t", counted=counted)
    await place.red.settled()
    if how == "the session ends":
        await place.session.close()
        with pytest.raises(ServiceFailure) as caught:
            await running
        assert caught.value.failure.code == CODE.ERROR_CODE_CANCELLED
        assert not place.engine.running and not place.session._plain._running
        return
    place.engine.gate.set()
    if how == "the engine dies":
        with pytest.raises(ActorDiedError):
            await running
    elif counted:
        with pytest.raises(ServiceFailure):
            await running
    else:
        assert (await running)[-1] == "failed"
    await place.quiet()
    assert (await place.session.stats()).done.traces == 1


@pytest.mark.parametrize("counted", [False, True])
async def test_a_session_forgets_the_requests_of_a_dead_ingress(counted: bool, gone: set[str]) -> None:
    place = await made(counted, running_traces=2)
    request = dataclasses.replace(submission("t", job=False)[0], key="k.t", session="serve/ingress")
    held = asyncio.ensure_future(place.lease.actor.ask.remote("s", "plain", request))
    await place.red.settled()
    assert (await place.session.stats()).traces_running == 1
    gone.add("serve/ingress")
    await place.session._plain._watch.look()
    with pytest.raises(ServiceFailure, match="ingress"):
        await held
    await place.quiet()


async def test_a_session_that_is_not_there_refuses_the_request() -> None:
    place = await made(False)
    place.lease = dataclasses.replace(place.lease, session_id="other")
    with pytest.raises(ServiceFailure) as caught:
        await place.run("t", counted=False)
    assert caught.value.failure.code == CODE.ERROR_CODE_NOT_FOUND
    await place.quiet()


async def test_many_requests_leave_nothing() -> None:
    place = await made(True, running_traces=3, waiting_traces=100)
    place.engine.gate.set()
    tasks = [place.begin(f"t{number}") for number in range(60)]
    for number, task in enumerate(tasks):
        if number % 3 == 0:
            asyncio.get_running_loop().call_later(number / 10_000, task.cancel)
    await asyncio.wait(tasks)
    assert all(task.cancelled() or task.result()[-1] == "output" for task in tasks)
    await asyncio.sleep(0.15)
    await place.quiet()


async def test_another_actor_does_not_take_a_request_over() -> None:
    """Its ingress would tell the dead actor of the request's end, and the request would never end there."""
    place = await made(False)
    actor, other = place.lease.actor, dataclasses.replace(place.lease, actor=Actor(place.session))
    asked = actor.remote

    def dies(session_id: str, method: str, *args: Any) -> asyncio.Task[Any]:
        async def dead() -> Any:
            await place.engine.began.wait()
            raise ActorDiedError

        return asyncio.ensure_future(dead()) if method == "plain" else asked(session_id, method, *args)

    actor.remote = dies
    recovered = asyncio.get_running_loop().create_future()
    recovered.set_result(other)
    place.red.recover = SimpleNamespace(remote=lambda *args: recovered)  # type: ignore[attr-defined]
    with pytest.raises(ServiceFailure) as caught:
        await place.run("t", counted=False)
    assert caught.value.failure.code == CODE.ERROR_CODE_UNAVAILABLE
    await place.quiet()
