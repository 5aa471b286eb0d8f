"""Streams of several callers over one call.

To open a call costs more than what goes over it. The first caller opens a call at once. Callers that come while a call is
being opened share the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Generic, TypeVar

from actors.failures import describe, unavailable
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb

# Callers that share a call.
MOST = 64
# Bytes of a trace that shares a call with other traces.
SMALL_BYTES = 64 * 1024
# Seconds that callers wait for the call before theirs to be open.
OPENING_SECONDS = 0.05

# What a caller of a shared call gets: the caller's number, data, and whether the caller's stream has ended. None: it goes on,
# b"": it has ended well, else a serialized `Failure`.
Item = tuple[int, bytes, bytes | None]

Q = TypeVar("Q")


@dataclasses.dataclass(eq=False)
class _Caller(Generic[Q]):
    """One caller: what it asks for, what has come for it, and the call that brings it."""

    request: Q
    arrived: asyncio.Queue[bytes | BaseException | None] = dataclasses.field(default_factory=asyncio.Queue)
    call: _Call[Q] | None = None
    over: bool = False

    def end(self, error: BaseException | None) -> None:
        if not self.over:
            self.over = True
            self.arrived.put_nowait(error)


@dataclasses.dataclass(eq=False)
class _Call(Generic[Q]):
    """One shared call."""

    callers: list[_Caller[Q]]
    task: asyncio.Task[None] | None = None


class Grouped(Generic[Q]):
    """Opens streams for callers that may share a call.

    Args:
        open: opens a call for some requests; the call yields lists of items (see `merged`).
        alone: whether a request gets a call of its own, at once.
        left: is told of a caller that has closed its stream, while its call goes on for other callers.
    """

    def __init__(
        self,
        open: Callable[[list[Q]], AsyncGenerator[Sequence[Item], None]],
        alone: Callable[[Q], bool] = lambda request: False,
        left: Callable[[Q], None] = lambda request: None,
    ) -> None:
        self._open = open
        self._alone = alone
        self._left = left
        self._waiting: list[_Caller[Q]] = []
        self._opening: _Call[Q] | None = None

    async def stream(self, request: Q) -> AsyncGenerator[bytes, None]:
        """Yield what comes for a request.

        A call whose callers have all closed their streams is closed.

        Raises:
            ServiceFailure: the stream ended with a failure; or what the call raises.
        """
        caller = _Caller(request)
        if self._alone(request):
            self._begin([caller])
        else:
            self._waiting.append(caller)
            self._next()
        try:
            while (data := await caller.arrived.get()) is not None:
                if isinstance(data, BaseException):
                    raise data
                yield data
        finally:
            self._leave(caller)

    def _leave(self, caller: _Caller[Q]) -> None:
        early, caller.over = not caller.over, True
        call = caller.call
        if call is None:
            self._waiting.remove(caller)
        elif call.task is not None and all(one.over for one in call.callers):
            call.task.cancel()
        elif early:
            self._left(caller.request)

    def _next(self) -> None:
        """Open a call for the callers that wait, unless a call is being opened."""
        if self._opening is not None or not self._waiting:
            return
        some, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        call = self._opening = self._begin(some)
        asyncio.get_running_loop().call_later(OPENING_SECONDS, self._opened, call)

    def _begin(self, callers: list[_Caller[Q]]) -> _Call[Q]:
        call = _Call(callers)
        for caller in callers:
            caller.call = call
        # A separate context: otherwise the call would count as a part of its first caller's own call, and be cancelled with it.
        call.task = asyncio.create_task(self._run(call), context=contextvars.Context())
        return call

    def _opened(self, call: _Call[Q]) -> None:
        if self._opening is call:
            self._opening = None
            self._next()

    async def _run(self, call: _Call[Q]) -> None:
        error: BaseException = ServiceFailure(unavailable("the call ended too early"))
        try:
            async with contextlib.aclosing(self._open([caller.request for caller in call.callers])) as items:
                async for some in items:
                    self._opened(call)
                    for number, data, end in some:
                        _give(call.callers[number], data, end)
        except Exception as raised:
            error = raised
        finally:
            self._opened(call)
            for caller in call.callers:
                caller.end(error)


def _give(caller: _Caller[Q], data: bytes, end: bytes | None) -> None:
    if caller.over:
        return
    if end is None:
        caller.arrived.put_nowait(data)
    else:
        caller.end(ServiceFailure(pb.Failure.FromString(end)) if end else None)


async def merged(streams: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[list[Item], None]:
    """Yield what several streams yield, for `Grouped`; the other side of a shared call.

    What is there at the same time comes in one list. A stream that raises ends with its failure, and the others go on. All
    streams are closed when this generator is closed.
    """
    arrived: asyncio.Queue[Item] = asyncio.Queue()

    async def read(number: int, stream: AsyncGenerator[bytes, None]) -> None:
        end = b""
        try:
            async with contextlib.aclosing(stream):
                async for data in stream:
                    arrived.put_nowait((number, data, None))
        except (Exception, asyncio.CancelledError) as error:
            end = describe(error).SerializeToString()
        arrived.put_nowait((number, b"", end))

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            some = [await arrived.get()]
            while not arrived.empty():
                some.append(arrived.get_nowait())
            left -= sum(end is not None for _, _, end in some)
            yield some
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
