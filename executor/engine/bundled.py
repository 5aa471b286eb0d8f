"""Events that are there at the same time, as one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from interpose.wire.events import bundles


async def bundled(events: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    """Yield the events of a queue until a None comes.

    Events that are there at the same time come in bundles.
    """
    there: list[bytes | None] = []
    while not (there and there[-1] is None):
        there = [await events.get()]
        while not events.empty():
            there.append(events.get_nowait())
        for bundle in bundles(event for event in there if event is not None):
            yield bundle
