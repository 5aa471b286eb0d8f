"""Each reader of an event log gets every event once and in order, whenever it begins."""

from __future__ import annotations

import asyncio

import pytest

from actors.event_log import EventLog
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart, kind_of


def log(text: str) -> bytes:
    return pb.Event(log=pb.Log(text=text)).SerializeToString()


async def texts(events: EventLog) -> list[str]:
    return [pb.Event.FromString(data).log.text async for bundle in events.follow() for data in apart(bundle)]


async def test_early_and_late_followers_read_the_same() -> None:
    events = EventLog()
    early = asyncio.create_task(texts(events))
    await asyncio.sleep(0)
    for text in "abc":
        events.append(log(text))
        await asyncio.sleep(0)
    middle = asyncio.create_task(texts(events))
    await asyncio.sleep(0)
    events.append(log("d"))
    events.end()
    assert await early == await middle == await texts(events) == list("abcd")


async def test_events_that_are_there_come_in_a_bundle() -> None:
    events = EventLog()
    for text in "abc":
        events.append(log(text))
    reading = events.follow(seen=1)
    first = await anext(reading)
    assert kind_of(first) == "bundle" and apart(first) == [log("b"), log("c")]
    events.append(log("d"))
    events.end()
    assert [data async for data in reading] == [log("d")]


async def test_nothing_follows_the_end() -> None:
    events = EventLog()
    events.end()
    events.append(log("late"))
    events.end(failure(pb.ERROR_CODE_ENGINE, "late"))
    assert await texts(events) == []


async def test_a_failure_comes_after_the_last_event() -> None:
    events = EventLog()
    events.append(log("a"))
    events.end(failure(pb.ERROR_CODE_UNAVAILABLE, "gone"))
    read = []
    with pytest.raises(ServiceFailure, match="gone"):
        async for data in events.follow():
            read.append(data)
    assert len(read) == 1
    assert events.size == len(read[0])
