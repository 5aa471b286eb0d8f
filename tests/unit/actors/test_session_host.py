"""A session actor holds many sessions: each call, and all that workers send, reaches the one that it is for and no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from actors.saved import Saved
from actors.session_host import SessionHost
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from tests.unit.actors.local_directory import LocalDirectory
from tests.unit.actors.test_session import TERMS, Engine, kinds, submission


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def host(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> SessionHost:
    """A host with the sessions "s" and "other", whose traces run in a scripted engine."""
    made = SessionHost("name", LocalDirectory())
    made._engines = engine  # type: ignore[assignment]
    for session_id in ("s", "other"):
        await made.open(session_id, False, TERMS)
    return made


async def test_a_trace_is_known_in_its_own_session(host: SessionHost, engine: Engine) -> None:
    await host.ask("s", "start", *submission())
    assert (await host.ask("s", "job", "t")).trace_id == "t"
    for session_id in ("other", "nobody", ""):
        with pytest.raises(ServiceFailure) as caught:
            await host.ask(session_id, "job", "t")
        assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND
        with pytest.raises(ServiceFailure):
            await kinds(host.follow(session_id, "attach", session_id, "t", "f"))  # type: ignore[arg-type]
    engine.gate.set()
    assert await kinds(host.follow("s", "attach", "s", "t", "f")) == ["accepted", "output", "output", "done"]  # type: ignore[arg-type]


async def test_what_workers_send_finds_the_session_of_its_trace(host: SessionHost, engine: Engine) -> None:
    for session_id in ("s", "other"):
        await host.ask(session_id, "start", *submission("t", session_id=session_id))
    [key] = host._sessions["s"]._store.by_key
    await host.adopt(key, f"{key}/0/0", Saved("reference", 8))
    await host.log(key, 0, "printed")
    await host.increment(key, pb.Increment().SerializeToString())
    assert host._sessions["s"]._store.traces["t"].arrivals.blobs
    assert not host._sessions["other"]._store.traces["t"].arrivals.blobs
    assert await host.ask("s", "blob_ref", f"{key}/0/0") == ["reference"]
    with pytest.raises(ServiceFailure, match="any more"):
        await host.ask("other", "blob_ref", f"{key}/0/0")
    with pytest.raises(ServiceFailure, match="there is no trace"):
        await host.blobs("unknown", ["x"])
    for call in (host.adopt("unknown", "x", Saved("r", 1)), host.log("unknown", 0, ""), host.no_room("unknown")):
        await call  # of a trace that has been forgotten


async def test_a_session_that_ends_takes_nothing_of_others_along(host: SessionHost, engine: Engine) -> None:
    for session_id in ("s", "other"):
        await host.ask(session_id, "start", *submission("t", session_id=session_id))
    stats = await host.close("s")
    assert stats is not None and stats.done.traces == 1 and await host.close("s") is None
    assert set(await host.stats()) == {"other"}
    engine.gate.set()
    assert (await kinds(host.follow("other", "attach", "other", "t", "f")))[-1] == "done"  # type: ignore[arg-type]
    with pytest.raises(ServiceFailure, match="the session has ended"):
        await host.ask("s", "describe")


async def test_only_what_clients_may_ask_for_is_called(host: SessionHost) -> None:
    for method in ("open", "restore", "_clear", "close", "sweep"):
        with pytest.raises(ValueError, match="not asked for"):
            await host.ask("s", method)
    with pytest.raises(ValueError, match="not asked for"):
        await kinds(host.follow("s", "job", "t"))  # type: ignore[arg-type]


async def test_sessions_are_swept(host: SessionHost, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[str] = []
    for session_id, session in host._sessions.items():
        monkeypatch.setattr(session, "sweep", lambda session_id=session_id: swept.append(session_id))
    monkeypatch.setattr("actors.session_host.SWEEP_SECONDS", 0.0)
    host._engines = SimpleNamespace(warm=lambda target: None)  # type: ignore[assignment]
    await host.prepare([])
    while len(swept) < 2:
        await asyncio.sleep(0.01)
    assert host._sweeper is not None
    host._sweeper.cancel()
    assert set(swept) == {"s", "other"}
