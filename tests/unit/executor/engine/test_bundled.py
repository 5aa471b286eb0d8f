"""Events of a trace go in messages, and no event waits long for others."""

from __future__ import annotations

import asyncio
import itertools
import time

from executor.engine.bundled import ALONE, EACH, bundled
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart

EVENTS = [pb.Event(log=pb.Log(text=str(number))).SerializeToString() for number in range(60)]


async def _messages(running: int, between: float) -> tuple[list[list[bytes]], list[float]]:
    """Return the events of each message, and when each message came; an event is put every `between` seconds."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def put() -> None:
        for event in EVENTS:
            queue.put_nowait(event)
            await asyncio.sleep(between)
        queue.put_nowait(None)

    task = asyncio.create_task(put())
    messages, times = [], []
    async for message in bundled(queue, lambda: running):
        messages.append(apart(message))
        times.append(time.monotonic())
    await task
    return messages, times


def test_every_event_comes_in_order_and_the_first_by_itself() -> None:
    messages, _ = asyncio.run(_messages(1, 0.001))
    assert [event for message in messages for event in message] == EVENTS
    assert messages[0] == EVENTS[:1]
    assert len(messages) < len(EVENTS)


def test_messages_keep_their_distance_but_for_the_last() -> None:
    running = 20
    messages, times = asyncio.run(_messages(running, 0.001))
    apart_by = [later - earlier for earlier, later in itertools.pairwise(times[:-1])]
    assert apart_by and min(apart_by) > EACH * running * 0.9 > ALONE
    assert [event for message in messages for event in message] == EVENTS


def test_events_that_come_seldom_do_not_wait() -> None:
    async def waited() -> float:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        stream = bundled(queue, lambda: 1)
        longest = 0.0
        for event in EVENTS[:5]:
            queue.put_nowait(event)
            began = time.monotonic()
            assert await anext(stream) == event
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(4 * ALONE)
        await stream.aclose()
        return longest

    assert asyncio.run(waited()) < 0.5, "a machine that is busy with something else included"


def test_the_end_is_not_waited_for() -> None:
    async def all_at_once() -> float:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        stream = bundled(queue, lambda: 100_000)  # a message every 150 seconds
        queue.put_nowait(EVENTS[0])
        assert await anext(stream) == EVENTS[0]
        for event in (*EVENTS[1:], None):
            queue.put_nowait(event)
        began = time.monotonic()
        rest = [event async for message in stream for event in apart(message)]
        assert rest == EVENTS[1:]
        return time.monotonic() - began

    assert asyncio.run(all_at_once()) < 10
