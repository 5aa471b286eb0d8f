"""Keeps all events of one trace, so that every reader gets them from the first event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import bundles


class EventLog:
    """An append-only list of events with any number of readers.

    Args:
        events: the first events, serialized.

    Attributes:
        ended: whether no more events will come.
        failure: why the trace as a whole failed, if it did.
        size: bytes of all events, and of what went by another way.
    """

    def __init__(self, events: Iterable[bytes] = ()) -> None:
        self.ended = False
        self.failure: pb.Failure | None = None
        self._events = list(events)
        self.size = sum(map(len, self._events))
        self._more = asyncio.Event()

    @property
    def events(self) -> tuple[bytes, ...]:
        """All events, serialized."""
        return tuple(self._events)

    def append(self, data: bytes) -> None:
        """Add a serialized event; ignored when the event log has ended."""
        if not self.ended:
            self.size += len(data)
            self._events.append(data)
            self._wake()

    def passed(self, size: int) -> None:
        """Count bytes that went to the client by another way."""
        if not self.ended:
            self.size += size

    def end(self, failure: pb.Failure | None = None) -> None:
        """End the event log."""
        if not self.ended:
            self.failure = failure
            self.ended = True
            self._wake()

    async def begun(self) -> None:
        """Wait until the first event is here.

        Raises:
            ServiceFailure: the trace failed before any event.
        """
        while not self._events and not self.ended:
            await self._more.wait()
        if not self._events and self.failure is not None:
            raise ServiceFailure(self.failure)

    async def follow(self, seen: int = 0) -> AsyncIterator[bytes]:
        """Yield the serialized events after the first `seen`, until the event log ends.

        Events that are there at the same time come in bundles.

        Raises:
            ServiceFailure: the trace as a whole failed; raised after its last event.
        """
        position = seen
        while True:
            more = self._more
            while position < len(self._events):
                there = self._events[position:]
                position += len(there)
                for data in bundles(there):
                    yield data
            if self.ended:
                break
            if more is self._more:
                await more.wait()
        if self.failure is not None:
            raise ServiceFailure(self.failure)

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
