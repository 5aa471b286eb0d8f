"""Recordings: whoever follows, whenever, gets every event once and in order."""

from __future__ import annotations

import asyncio

import pytest

from actors.recording import Recording
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb


def log(text: str) -> bytes:
    return pb.Event(log=pb.Log(text=text)).SerializeToString()


async def texts(recording: Recording) -> list[str]:
    return [pb.Event.FromString(data).log.text async for data in recording.follow()]


async def test_early_and_late_followers_read_the_same() -> None:
    recording = Recording()
    early = asyncio.create_task(texts(recording))
    await asyncio.sleep(0)
    for text in "abc":
        recording.append(log(text))
        await asyncio.sleep(0)
    middle = asyncio.create_task(texts(recording))
    await asyncio.sleep(0)
    recording.append(log("d"))
    recording.end()
    assert await early == await middle == await texts(recording) == list("abcd")


async def test_nothing_follows_the_end() -> None:
    recording = Recording()
    recording.end()
    recording.append(log("late"))
    recording.end(failure(pb.ERROR_CODE_ENGINE, "late"))
    assert await texts(recording) == []


async def test_a_failure_comes_after_the_last_event() -> None:
    recording = Recording()
    recording.append(log("a"))
    recording.end(failure(pb.ERROR_CODE_UNAVAILABLE, "gone"))
    read = []
    with pytest.raises(ServiceFailure, match="gone"):
        async for data in recording.follow():
            read.append(data)
    assert len(read) == 1
    assert recording.size == len(read[0])
