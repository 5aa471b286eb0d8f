"""Uploads that later sessions find again: by tenant, within bounds, and not for ever."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from actors.session import Session
from actors.upload_store import UploadStore
from tests.unit.actors.local_directory import LocalDirectory
from tests.unit.actors.test_session import TERMS

SECONDS = 600.0


async def copied(ref: str) -> str:
    return f"copy of {ref}"


def store(max_bytes: int = 100) -> UploadStore:
    return UploadStore(max_bytes, SECONDS, copied)


async def test_another_tenant_does_not_find_an_upload() -> None:
    uploads = store()
    assert await uploads.keep("red", "a", "ref", 10, None) == "copy of ref"
    assert uploads.find("red", "a", 10) == "copy of ref"
    assert uploads.find("red", "a", 11) is None, "of this size there is none"
    assert uploads.find("blue", "a", 10) is None
    assert await uploads.keep("blue", "a", "other", 10, None) == "copy of other", "no copy is shared between tenants"
    assert uploads.find("red", "a", 10) == "copy of ref"


async def test_what_was_used_longest_ago_goes_and_only_of_the_same_tenant() -> None:
    uploads = store()
    for digest in ("a", "b", "c"):
        await uploads.keep("red", digest, digest, 30, None)
    await uploads.keep("blue", "a", "a", 100, None)
    assert uploads.find("red", "a", 30)
    await uploads.keep("red", "d", "d", 40, None)
    assert [digest for digest in "abcd" if uploads.find("red", digest, 40 if digest == "d" else 30)] == ["a", "c", "d"]
    assert uploads.bytes_of("red") == 100
    assert uploads.find("blue", "a", 100)


@pytest.mark.parametrize(("max_bytes", "quota"), [(9, None), (100, 9), (0, None)])
async def test_what_is_larger_than_the_bounds_is_not_kept(max_bytes: int, quota: int | None) -> None:
    uploads = store(max_bytes)
    assert await uploads.keep("red", "a", "ref", 10, quota) is None
    assert uploads.find("red", "a", 10) is None


async def test_a_quota_bounds_what_is_kept() -> None:
    uploads = store()
    await uploads.keep("red", "a", "a", 10, 15)
    await uploads.keep("red", "b", "b", 10, 15)
    assert uploads.find("red", "a", 10) is None and uploads.bytes_of("red") == 10


async def test_an_upload_goes_when_no_session_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    uploads = store()
    await uploads.keep("red", "a", "a", 10, None)
    await uploads.keep("red", "b", "b", 10, None)
    now += SECONDS - 1
    assert uploads.find("red", "a", 10)
    now += 2
    uploads.sweep()
    assert uploads.find("red", "b", 10) is None
    assert uploads.find("red", "a", 10)
    assert uploads.clear() and not uploads.clear() and not uploads.bytes_of("red")


async def test_two_sessions_that_bring_the_same_keep_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()

    async def slow(ref: str) -> str:
        await gate.wait()
        return f"copy of {ref}"

    uploads = UploadStore(15, SECONDS, slow)
    both = [asyncio.ensure_future(uploads.keep("red", "a", ref, 10, None)) for ref in ("one", "two")]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*both) == ["copy of one", "copy of one"]
    assert uploads.bytes_of("red") == 10


async def test_a_later_session_asks_and_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.uploads.put", lambda data: ("stored", bytes(data)))
    directory = LocalDirectory()
    data = b"0123456789"
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    sessions = []
    for _ in range(2):
        session = Session(None, directory, TERMS)  # type: ignore[arg-type]
        await session.open("s", False, TERMS)
        sessions.append(session)
    assert await sessions[0].upload("s", digest, len(data), 0, b"") == 0
    assert await sessions[0].upload("s", digest, len(data), 0, data) == len(data)
    assert await sessions[1].upload("s", digest, len(data), 0, b"") == len(data), "nothing is sent"
    assert (await sessions[1].stats()).stored_bytes == len(data), "it counts as if it had been sent"
    found = sessions[1]._store.uploads.ref(digest)
    assert found == ("stored", data)
