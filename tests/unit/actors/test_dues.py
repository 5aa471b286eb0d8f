"""Sessions that ask the account: exact when many ask at once, and paid however a trace ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib

import pytest

from actors.quota_use import Cost
from actors.saved import Saved
from actors.session import Session
from interpose.contract.errors import ServiceFailure
from tests.unit.actors.local_account import LocalAccount, submission
from tests.unit.actors.reading import events_of


@pytest.fixture(autouse=True)
def _no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.uploads.put", lambda data: "reference")


async def outcome(session: Session, trace_id: str, session_id: str = "s", **options: object) -> str:
    """Submit a job; return what was refused, or ""."""
    try:
        await session.start(session_id, *submission(trace_id, session_id, **options))  # type: ignore[arg-type]
    except ServiceFailure as error:
        return error.failure.quota.name
    return ""


async def end(session: Session, trace_id: str) -> None:
    """Wait until a trace has ended."""
    with contextlib.suppress(ServiceFailure):
        await events_of(session.attach(session._store.session_id, trace_id, "f"))


async def test_of_sixty_four_at_once_exactly_ten_are_accepted() -> None:
    """Over several sessions, whichever of them asks first."""
    red = LocalAccount(running_traces=4, waiting_traces=6)
    sessions = {f"s{number}": await red.open(f"s{number}") for number in range(8)}
    told = await asyncio.gather(
        *(outcome(sessions[f"s{number % 8}"], f"t{number}", f"s{number % 8}") for number in range(64))
    )
    assert told.count("") == 10 and told.count("waiting_traces") == 54
    assert (red.account.usage("red").running, red.account.usage("red").waiting) == (4, 6)
    red.engine.gate.set()
    for number, name in enumerate(told):
        if not name:
            await end(sessions[f"s{number % 8}"], f"t{number}")
    assert red.engine.most == 4 and red.engine.running == 0
    assert (red.account.usage("red").running, red.account.usage("red").waiting) == (0, 0)


async def test_the_next_trace_finds_the_quota_of_the_last_one_free() -> None:
    red = LocalAccount(running_traces=1, waiting_traces=0)
    session, other = await red.open("s"), await red.open("other")
    red.engine.gate.set()
    for number in range(20):
        mine, name = (session, "s") if number % 2 else (other, "other")
        events = await events_of(mine.run(*submission(f"t{number}", name, job=False), "f"))
        assert [event.WhichOneof("kind") for event in events] == ["accepted", "output", "output", "done"]


async def test_a_refused_trace_leaves_nothing_and_may_come_again() -> None:
    red = LocalAccount(running_traces=1, waiting_traces=0)
    session = await red.open("s")
    assert await outcome(session, "runs") == ""
    held = (await session.stats()).stored_bytes
    assert await outcome(session, "more") == "running_traces"
    with pytest.raises(ServiceFailure, match="the most that may run"):
        await events_of(session.run(*submission("more", job=False), "f"))
    stats = await session.stats()
    assert stats.stored_bytes == held and set(session._store.traces) == {"runs"} and len(stats.owing) == 1
    assert set(red.archive.of("s").traces) == {session._store.traces["runs"].key}
    red.engine.gate.set()
    await end(session, "runs")
    assert await outcome(session, "more") == ""


async def test_a_trace_that_is_submitted_twice_at_once_is_admitted_once() -> None:
    red = LocalAccount(running_traces=4, tokens_per_minute=100)
    session = await red.open("s")
    assert await asyncio.gather(*(outcome(session, "t") for _ in range(3))) == ["", "", ""]
    assert red.used("tokens_per_minute") == 10 and red.account.usage("red").running == 1


@pytest.mark.parametrize("how", ["done", "failed", "cancelled", "closed", "cancelled while it waits"])
async def test_tokens_come_back_however_a_trace_ends(how: str) -> None:
    red = LocalAccount(running_traces=1, tokens_per_minute=1000)
    session = await red.open("s")
    if how == "cancelled while it waits":
        await outcome(session, "before")
    await outcome(session, "t", tokens=500)
    await red.settled()
    if how == "done":
        red.engine.gate.set()
        await end(session, "t")
        assert red.used("tokens_per_minute") == 5
    elif how == "failed":
        red.engine.fails = True
        red.engine.gate.set()
        await end(session, "t")
        await red.settled()
        assert red.used("tokens_per_minute") == 3
    elif how == "cancelled":
        await session.cancel("s", "t")
        await red.settled()
        assert red.used("tokens_per_minute") == 3
    elif how == "closed":
        await session.close()
        assert red.used("tokens_per_minute") == 3, (
            "what it has used is known before the session's end gives back the rest"
        )
    else:
        await session.cancel("s", "t")
        await red.settled()
        assert red.used("tokens_per_minute") == 10 and red.account.usage("red").waiting == 0
        return
    assert red.account.usage("red").running == 0 and not (await session.stats()).owing


async def test_a_trace_that_is_cancelled_while_the_account_is_asked_owes_nothing() -> None:
    red = LocalAccount(running_traces=1, tokens_per_minute=1000)
    session = await red.open("s")
    starting = asyncio.create_task(outcome(session, "t"))
    await asyncio.sleep(0)
    await session.cancel("s", "t")
    with contextlib.suppress(ServiceFailure):
        await starting
    await red.settled()
    assert red.account.usage("red").running == 0 and red.used("tokens_per_minute") == 0


async def test_a_session_that_goes_on_elsewhere_owes_what_it_holds() -> None:
    red = LocalAccount(running_traces=2, tokens_per_minute=1000, stored_bytes=10_000)
    session = await red.open("s")
    red.engine.gate.set()
    await outcome(session, "t")
    await end(session, "t")
    held = red.used("stored_bytes")
    red.engine.gate.clear()
    await outcome(session, "lost", tokens=400)
    red.account.lost("s")  # as the directory does when the actor is dead
    assert red.account.usage("red").running == 0 and red.used("tokens_per_minute") == 5
    other = Session(red.engine, red, session._store.terms)  # type: ignore[arg-type]
    red.sessions["s"] = other
    await other.restore("s", red.archive.of("s"), session._store.terms)
    await red.settled()
    assert red.used("stored_bytes") == (await other.stats()).stored_bytes > held
    red.account.settle(
        session._store.traces["lost"].key, Cost(100)
    )  # too late, and from an actor that is taken for dead
    assert red.used("tokens_per_minute") == 5


async def test_uploads_of_all_sessions_count_from_their_first_chunk() -> None:
    red = LocalAccount(stored_bytes=10_000)
    one, other = await red.open("one"), await red.open("other")
    data = b"x" * 6000
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert await one.upload("one", digest, 6000, 0, data[:10]) == 10
    assert red.used("stored_bytes") == 6000
    with pytest.raises(ServiceFailure) as caught:
        await other.upload("other", digest, 6000, 0, data)
    assert caught.value.failure.quota.name == "stored_bytes" and caught.value.failure.retry_after > 0
    assert await other.upload("other", digest, 4000, 0, b"") == 0
    assert red.used("stored_bytes") == 10_000
    assert await one.upload("one", digest, 6000, 10, data[10:]) == 6000
    assert red.used("stored_bytes") == 10_000, "a complete upload counts as before"


async def test_of_many_uploads_at_once_as_many_as_fit_are_taken() -> None:
    red = LocalAccount(stored_bytes=10_000)
    sessions = [(f"s{number}", await red.open(f"s{number}")) for number in range(4)]

    async def upload(number: int) -> bool:
        name, session = sessions[number % 4]
        try:
            await session.upload(name, f"sha256:{number:064x}", 1000, 0, b"x")
        except ServiceFailure:
            return False
        return True

    assert sum(await asyncio.gather(*(upload(number) for number in range(40)))) == 10
    assert red.used("stored_bytes") == 10_000


async def test_an_upload_with_the_wrong_digest_gives_its_room_back() -> None:
    red = LocalAccount(stored_bytes=10_000)
    one, other = await red.open("one"), await red.open("other")
    with pytest.raises(ServiceFailure, match="digest"):
        await one.upload("one", f"sha256:{0:064x}", 6000, 0, b"x" * 6000)
    await red.settled()
    assert red.used("stored_bytes") == 0
    assert await other.upload("other", f"sha256:{0:064x}", 6000, 0, b"x") == 1


async def test_saved_values_count_and_the_trace_that_saves_too_much_fails() -> None:
    red = LocalAccount(stored_bytes=100_000, saved_bytes_per_minute=20_000)
    session = await red.open("s")
    await outcome(session, "t")
    [key] = session._store.by_key
    await session.adopt(key, f"{key}/0/0", Saved("reference", 30_000))
    assert red.used("saved_bytes_per_minute") == 30_000 and red.used("stored_bytes") > 30_000
    await session.adopt(key, f"{key}/0/1", Saved("reference", 30_000))
    red.engine.gate.set()
    with pytest.raises(ServiceFailure) as caught:
        await events_of(session.attach("s", "t", "f"))
    assert caught.value.failure.quota.name == "saved_bytes_per_minute" and caught.value.failure.trace_id == "t"
    assert await outcome(session, "next") == "saved_bytes_per_minute"


async def test_values_that_no_client_comes_for_make_room_first() -> None:
    red = LocalAccount(stored_bytes=10_000)
    session = await red.open("s")
    red.engine.gate.set()
    await events_of(session.run(*submission("old", job=False), "f"))
    run = session._store.traces["old"]
    run.arrivals.take("old/0/0", Saved("reference", 0))
    red.engine.gate.clear()
    assert await outcome(session, "t") == ""
    [_, key] = session._store.by_key
    await session.adopt(key, f"{key}/0/0", Saved("reference", 10_000 - int(red.used("stored_bytes")) + 20))
    assert "old" not in session._store.traces and f"{key}/0/0" in session._store.by_key[key].arrivals.blobs


async def test_what_expires_is_given_back() -> None:
    red = LocalAccount(stored_bytes=10_000)
    session = await red.open("s")
    red.engine.gate.set()
    await outcome(session, "t")
    await end(session, "t")
    assert red.used("stored_bytes") > 0
    session._store.traces["t"].progress.move(-1000.0)
    session.sweep()
    await red.settled()
    assert red.used("stored_bytes") == 0


async def test_long_logs_of_running_traces_are_counted_while_they_run() -> None:
    red = LocalAccount(stored_bytes=3 << 20)
    session = await red.open("s", stored_bytes=1 << 30)
    await outcome(session, "t")
    [key] = session._store.by_key
    await session.log(key, 0, "x" * (4 << 20))
    red.engine.gate.set()
    with pytest.raises(ServiceFailure) as caught:
        await events_of(session.attach("s", "t", "f"))
    assert caught.value.failure.quota.name == "stored_bytes"


async def test_quotas_that_come_later_hold_for_the_next_trace() -> None:
    import dataclasses

    red = LocalAccount()
    session = await red.open("s")
    session.heed(dataclasses.replace(session._store.terms, counted=False))
    assert await outcome(session, "free") == "" and not (await session.stats()).owing
    session.heed(dataclasses.replace(session._store.terms, counted=True))
    assert await outcome(session, "asks") == "" and len((await session.stats()).owing) == 1
