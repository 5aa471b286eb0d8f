"""Runs plain requests on engines, beside sessions that account for them.

The answer of such a request passes through no session actor. The session asks the tenant's account, counts, lists and cancels the
request (`actors.plain_requests`), while the engine works. Where the tenant has quotas, the engine is called when the session says
so.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from actors.engine_stream import EngineCalls
from actors.failures import describe, unavailable
from actors.grouped import SMALL_BYTES
from actors.protocol import Lease, Route
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart, bundles, kind_of
from interpose.wire.request import TraceRequest, new_key
from serve_app.ingress.calls import Serialized
from serve_app.ingress.sessions import SessionCalls


def is_plain(trace: pb.Trace, size: int) -> bool:
    """Return whether the ingress runs a trace itself: a small request without a block.

    Args:
        size: bytes of the serialized trace.
    """
    return trace.HasField("openai") and not trace.openai.traced and size <= SMALL_BYTES


class PlainCalls:
    """The plain requests of one ingress replica.

    Args:
        sessions: calls sessions.
        caller: the replica's name as a caller (`actors.caller_watch`).
        grpc: whether engines are called over gRPC (see `EngineCalls`).
    """

    def __init__(self, sessions: SessionCalls, caller: str, grpc: bool = False) -> None:
        self._sessions = sessions
        self._caller = caller
        self._engines = EngineCalls(caller, sessions.directory, grpc)
        self._tails: set[asyncio.Task[None]] = set()

    async def run(
        self, lease: Lease, request: TraceRequest, route: Route, counted: bool
    ) -> AsyncGenerator[Serialized, None]:
        """Run a request; yield its events in bundles, up to the last event of the engine.

        Args:
            lease: the session that accounts for the request.
            route: where the request runs.
            counted: whether the tenant has quotas. The account knows the request's costs then before the generator ends.

        Raises:
            ServiceFailure: the session or the engine refused the request, or one of them is gone.
        """
        self._engines.directory = self._sessions.directory
        request = dataclasses.replace(request, key=new_key(request.trace_id), session=self._caller)
        account = _Account(self._sessions, lease, request)
        events, ended = self._engines.run(route, request), False
        try:
            await asyncio.sleep(0)  # the session gets the request before any call about it
            if counted:
                await account.may_run()
            async with contextlib.aclosing(account.beside(events)) as items:
                async for data in items:
                    if ended := account.tell(data):
                        account.end(None)
                    yield Serialized(data)
                    if ended:
                        break
                else:
                    raise ServiceFailure(unavailable("the engine's answer ended too early", request.trace_id))
        except BaseException as error:  # a client that has gone closes this generator
            if not ended:
                account.end(_cancelled(error) or describe(error, request.trace_id))
                await events.aclose()
            raise
        finally:
            if ended:
                self._finish(events, account)
        if counted:
            await account.settled()

    def _finish(self, events: AsyncGenerator[bytes, None], account: _Account) -> None:
        """Read a call of an engine to its end, which is near.

        A call that is closed before its end is cancelled.
        """

        async def finish() -> None:
            with contextlib.suppress(Exception):
                async with contextlib.aclosing(events):
                    async for _ in events:
                        pass
            with contextlib.suppress(Exception):
                await account.settled()

        # A separate context: otherwise Serve cancels what runs here when the request's own call ends.
        task = asyncio.create_task(finish(), context=contextvars.Context())
        self._tails.add(task)
        task.add_done_callback(self._tails.discard)


class _Account:
    """What a session is told of one request, and says of it.

    Args:
        sessions: calls sessions.
        lease: the session.
        request: the request.
    """

    def __init__(self, sessions: SessionCalls, lease: Lease, request: TraceRequest) -> None:
        self._lease = lease
        self._request = request
        self._begun = False
        self._size = 0
        self._events: list[bytes] = []
        # A separate context: otherwise Ray takes the session's call for a part of the client's, and cancels it with that.
        self._held: asyncio.Task[Any] = asyncio.create_task(
            sessions.ask(lease, "plain", request), context=contextvars.Context()
        )

    async def may_run(self) -> None:
        """Wait until the session lets the request run.

        Raises:
            ServiceFailure: the request must not run.
        """
        turn = asyncio.ensure_future(self._ask("may_run", self._request.key))
        await asyncio.wait({turn, self._held}, return_when=asyncio.FIRST_COMPLETED)
        self._check()
        await turn

    async def beside(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield an engine's events until the session ends the request.

        Raises:
            ServiceFailure: the session has ended the request.
        """
        while True:
            step = asyncio.ensure_future(anext(events, None))
            try:
                await asyncio.wait({step, self._held}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not step.done():
                    step.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await step
            if step.cancelled():
                self._check()
                return
            if (data := step.result()) is None:
                return
            yield data

    def tell(self, data: bytes) -> bool:
        """Note an event or a bundle of the engine; return whether it is the engine's last."""
        last, first = False, not self._begun
        self._begun = True
        for event in apart(data):
            kind = kind_of(event)
            if kind == "http":
                self._size += len(event)
            else:
                self._events.append(event)
            last = last or kind == "failed" or (kind == "output" and pb.Event.FromString(event).output.finished)
        if first and not last:
            self._tell(None)
        return last

    def end(self, fact: pb.Failure | None) -> None:
        """Tell the session that the request has ended, unless the session has ended it.

        Args:
            fact: why it failed; None if it has ended well.
        """
        self._held.add_done_callback(
            lambda held: held.cancelled() or held.exception()
        )  # or asyncio would log the failure
        if not self._held.done():
            self._tell(fact.SerializeToString() if fact is not None else b"")

    async def settled(self) -> None:
        """Wait until the session has accounted for the request.

        Raises:
            ServiceFailure: the request has failed.
        """
        await asyncio.wait({self._held})
        self._check()

    def _tell(self, end: bytes | None) -> None:
        *some, last = list(bundles(self._events)) or [b""]
        for events in some:
            self._ask("told", self._request.key, 0, events, None)
        self._ask("told", self._request.key, self._size, last, end)
        self._events, self._size = [], 0

    def _check(self) -> None:
        if self._held.done() and (error := self._held.exception()) is not None:
            raise ServiceFailure(describe(error, self._request.trace_id)) from None

    def _ask(self, method: str, *args: Any) -> Any:
        return self._lease.actor.ask.remote(self._lease.session_id, method, *args)


def _cancelled(error: BaseException) -> pb.Failure | None:
    """Return the failure of a request whose client is gone; None for any other error."""
    return None if isinstance(error, Exception) else describe(asyncio.CancelledError())
