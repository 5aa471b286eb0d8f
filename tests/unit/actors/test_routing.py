"""Which engine replica a session's call goes to, with replicas and a directory that are scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter

from actors import engine_stream
from actors.engine_stream import EngineCalls
from actors.grouped import Item, merged
from actors.protocol import ModelState, Route, Target
from actors.taking import taking
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest
from serve_app.builder import ROUTER

EVENT = pb.Event(output=pb.Output(token_ids=[1]))


def router(deployment: str) -> RequestRouter:
    """A router as Serve makes it in a session's process: it gets the class pickled."""
    kind: Any = RequestRouterConfig(request_router_class=ROUTER).get_request_router_class()
    return kind(DeploymentID(deployment, "app"), DeploymentHandleSource.UNKNOWN)


def replica(name: str) -> Any:
    async def queue_length(deadline_s: float) -> int:
        return 0

    identity = ReplicaID(name, DeploymentID("d", "app"))
    return SimpleNamespace(replica_id=identity, get_queue_len=queue_length)


def request(session_id: str) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", call_method="run", session_id=session_id)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


async def chosen(session_id: str, *names: str) -> list[list[str]]:
    ranks = await router("chosen").choose_replicas([replica(name) for name in names], request(session_id))
    return [[one.replica_id.unique_id for one in rank] for rank in ranks]


async def test_the_replica_that_is_named_is_the_only_choice() -> None:
    assert await chosen("b", "a", "b", "c") == [["b"]]


@pytest.mark.parametrize("name", ["", "gone"])
async def test_of_all_others_serve_takes_the_one_with_the_fewest_requests(name: str) -> None:
    assert await chosen(name, "a", "b", "c") == [["a", "b", "c"]]


async def test_a_request_that_no_replica_takes_waits_a_little_before_the_next_try() -> None:
    pending = request("a")
    await router("wait").choose_replicas([replica("a")], pending)
    assert pending.routing_context.should_backoff


async def test_this_process_knows_who_takes_requests() -> None:
    one = router("known")
    assert taking(Target("app", "known")) is None
    one.update_replicas([replica("a"), replica("b")])
    assert taking(Target("app", "known")) == {"a", "b"}
    one.update_replicas([])
    assert taking(Target("app", "known")) == frozenset()


class Directory:
    """Says of every model that it runs; notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.state = "RUNNING"

    def __getattr__(self, name: str) -> Any:
        async def model_state(target: Target) -> ModelState:
            return ModelState(self.state, 1, 0, 0)

        if name == "model_state":
            return SimpleNamespace(remote=model_state)
        return SimpleNamespace(remote=lambda *args: self.told.append((name, *args)))


class Handle:
    """A handle to replicas of which `replica` takes the call."""

    def __init__(self, replica: str, error: Exception | None = None) -> None:
        self.asked_for: list[str] = []
        self.cancelled = 0
        self._replica = replica
        self._error = error

    def options(self, session_id: str) -> Handle:
        self.asked_for.append(session_id)
        return self

    def remote(self, requests: list[TraceRequest]) -> Any:
        [request] = requests
        assert request.session == "actor"

        async def items() -> AsyncGenerator[bytes, None]:
            if not self._replica:
                await asyncio.Event().wait()
            yield self._replica.encode()
            yield EVENT.SerializeToString()

        async def call() -> AsyncGenerator[list[Item], None]:
            async with contextlib.aclosing(merged([items()])) as some:
                async for one in some:
                    yield one if self._error is None else [item for item in one if item[2] is None]
            if self._error is not None:
                raise self._error

        made = call()

        class Responses:
            def __aiter__(_) -> Any:
                return made

            def __anext__(_) -> Any:
                return made.__anext__()

            def cancel(_) -> None:
                self.cancelled += 1

        return Responses()


async def events_of(handle: Handle, directory: Directory, target: Target) -> list[pb.Event]:
    calls = EngineCalls("actor", directory)
    calls._handles[target] = handle
    request = TraceRequest(b"", session_id="s", trace_id="t")
    return [pb.Event.FromString(data) async for data in calls.run(Route(target, "a"), request)]


async def test_the_sessions_own_replica_takes_its_trace() -> None:
    directory, handle = Directory(), Handle("a")
    assert await events_of(handle, directory, Target("app", "d")) == [EVENT]
    assert handle.asked_for == ["a"] and handle.cancelled == 1 and directory.told == []


async def test_another_one_is_the_sessions_own_from_then_on() -> None:
    directory, target = Directory(), Target("app", "d")
    assert await events_of(Handle("b"), directory, target) == [EVENT]
    assert directory.told == [("moved", "s", target, "b")]


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("gone", None)], ids=["Ray", "gRPC"])
async def test_one_that_dies_is_told_of(error: Exception) -> None:
    directory = Directory()
    with pytest.raises(type(error)):
        await events_of(Handle("a", error), directory, Target("app", "d"))
    assert directory.told == [("lost", "a")]


@pytest.mark.parametrize("reason", ["loading", "removed"])
async def test_nothing_waits_for_an_engine_that_takes_nothing(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(engine_stream, "POLL_SECONDS", 0.01)
    directory, handle = Directory(), Handle("")
    if reason == "loading":
        directory.state = "LOADING"
    else:
        router("removed").update_replicas([])
    with pytest.raises(ServiceFailure) as caught:
        await asyncio.wait_for(events_of(handle, directory, Target("app", reason)), 20)
    assert caught.value.failure.code == pb.ERROR_CODE_UNAVAILABLE and caught.value.failure.retry_after > 0
    await asyncio.sleep(0.01)
    assert handle.cancelled == 1


class SharedHandle:
    """A handle to one replica, whose traces run until they are aborted.

    Attributes:
        calls: the ids of the traces of each call.
        aborted: the keys of aborted traces.
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.aborted: list[str] = []
        self.cancelled = 0
        self.gate = asyncio.Event()

    def options(self, **options: Any) -> Any:
        if options.get("method_name") == "abort":
            assert options["stream"] is False
            return SimpleNamespace(remote=self.aborted.append)
        return self

    def remote(self, requests: list[TraceRequest]) -> Any:
        self.calls.append([request.trace_id for request in requests])

        async def items() -> AsyncGenerator[bytes, None]:
            yield b"a"
            await asyncio.Event().wait()

        async def call() -> AsyncGenerator[list[Item], None]:
            await self.gate.wait()
            async with contextlib.aclosing(merged([items() for _ in requests])) as some:
                async for one in some:
                    yield one

        made = call()

        def cancel() -> None:
            self.cancelled += 1

        return _Responses(made, cancel)


class _Responses:
    """A call's answers, as a handle of Serve gives them."""

    def __init__(self, made: AsyncGenerator[list[Item], None], cancel: Any) -> None:
        self._made = made
        self.cancel = cancel

    def __aiter__(self) -> AsyncGenerator[list[Item], None]:
        return self._made


@pytest.mark.parametrize("counted", [False, True])
async def test_traces_share_a_call_unless_serve_counts_them(counted: bool) -> None:
    target, handle = Target("app", "shared"), SharedHandle()
    calls = EngineCalls("actor", Directory())
    calls._handles[target] = handle
    route = Route(target, "a", counted)

    async def run(name: str) -> None:
        async for _ in calls.run(route, TraceRequest(b"", key=f"key of {name}", session_id="s", trace_id=name)):
            pass

    running = [asyncio.create_task(run(name)) for name in "abc"]
    while not handle.calls:
        await asyncio.sleep(0)
    handle.gate.set()
    await asyncio.sleep(0.01)
    assert handle.calls == ([["a"], ["b"], ["c"]] if counted else [["a"], ["b", "c"]])
    running[1].cancel()
    await asyncio.wait({running[1]})
    await asyncio.sleep(0.01)
    assert handle.aborted == ([] if counted else ["key of b"]) and handle.cancelled == counted
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await asyncio.sleep(0.01)
    assert handle.cancelled == len(handle.calls) and handle.aborted == ([] if counted else ["key of b"])
