"""The plain requests of a session, which the ingress itself runs on engines.

A plain request has no block, so a session holds no value of it. The session asks the account for it, counts it, and lists and
cancels it as a trace. The ingress tells the session what the engine has done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from actors.caller_watch import CallerWatch
from actors.failures import unavailable
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest

# Tries to find a request that a call is about, and seconds between them: the call may overtake the call that brings the request.
TRIES, TRY_SECONDS = 20, 0.1

# What a session records when the answer to a request has begun.
_BEGUN = pb.Event(http=pb.Http()).SerializeToString()


class PlainRequest:
    """The engine of one plain request, as its session sees it: what the ingress tells.

    Args:
        watch: notices that the ingress is gone.

    Attributes:
        settled: is set when the request may run, or never will.
    """

    def __init__(self, watch: CallerWatch) -> None:
        self._watch = watch
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._failure: pb.Failure | None = None
        self._ended = False
        self.settled = asyncio.Event()

    async def run(self, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        """Yield the events that the ingress tells of.

        Raises:
            ServiceFailure: the engine failed, or the ingress is gone.
        """
        self.settled.set()
        async with contextlib.aclosing(self._watch.while_alive(request.session, self._told())) as events:
            async for event in events:
                yield event
        if not self._ended:
            raise ServiceFailure(unavailable("the ingress that ran the request is gone", request.trace_id))

    async def _told(self) -> AsyncGenerator[bytes, None]:
        while (event := await self._arrived.get()) is not None:
            yield event
        self._ended = True
        if self._failure is not None:
            raise ServiceFailure(self._failure)

    def told(self, events: bytes, end: bytes | None) -> None:
        """Take what the engine has done.

        Args:
            events: a serialized event or bundle, without parts of the answer; b"" for parts of the answer alone.
            end: None while the request runs; b"" when it has ended; else a serialized `Failure`.
        """
        self._arrived.put_nowait(events or _BEGUN)
        if end is not None:
            self._failure = pb.Failure.FromString(end) if end else None
            self._arrived.put_nowait(None)


class PlainRequests:
    """The plain requests of one session, by their keys.

    Args:
        watch: notices that an ingress is gone.
    """

    def __init__(self, watch: CallerWatch) -> None:
        self._watch = watch
        self._running: dict[str, PlainRequest] = {}

    @contextlib.contextmanager
    def request(self, key: str) -> Iterator[PlainRequest]:
        """Hold a request until it has ended."""
        made = self._running[key] = PlainRequest(self._watch)
        try:
            yield made
        finally:
            del self._running[key]
            made.settled.set()

    async def find(self, key: str) -> PlainRequest | None:
        """Return a request that a call is about; None if it has ended."""
        for _ in range(TRIES):
            if (found := self._running.get(key)) is not None:
                return found
            await asyncio.sleep(TRY_SECONDS)
        return None
