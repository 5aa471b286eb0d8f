"""Events that come at about the same time, as one message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from interpose.wire.events import bundles

# Seconds from one message of a trace to its next, at least: for a trace alone, and for each trace that runs beside others. A
# message passes through three or four processes, each of which takes most of a millisecond for it and serves all traces. A fast
# model, or many streams, would keep them busy with messages of one token.
ALONE = 0.005
EACH = 0.0015


async def bundled(events: asyncio.Queue[bytes | None], running: Callable[[], int]) -> AsyncIterator[bytes]:
    """Yield the events of a queue until a None comes.

    The first event goes at once. An event that comes soon after a message waits until the next message is due, and goes with
    all events that came until then. The end waits for nothing.

    Args:
        events: serialized, and None at their end.
        running: returns how many traces run.
    """
    loop = asyncio.get_running_loop()
    due = 0.0
    there: list[bytes | None] = []
    while not (there and there[-1] is None):
        there = [await events.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                while there[-1] is not None:
                    there.append(await events.get())
        while not events.empty():
            there.append(events.get_nowait())
        for bundle in bundles(event for event in there if event is not None):
            yield bundle
        due = loop.time() + max(ALONE, EACH * running())
