"""A submitted trace on the client's side: its events, and its cancellation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from interpose.contract.errors import InterposeError, Unavailable
from interpose.rpc.channel import Stream
from interpose.rpc.reader import Arrivals
from interpose.rpc.reconnect import Resuming
from interpose.rpc.spans import ClientSpan
from interpose.v1.trace_pb2 import Event


class Running:
    """A trace on the server; its client may close it at any time.

    Args:
        session_id: the session of the trace.
        trace_id: the id of the trace.
        stream: the call that brings the events. `accepted` starts the call, so that an interrupted caller already has an
            object to close.
        cancel: cancels the trace on the server. Its argument says whether to wait for the server's reply.
        span: ends with the trace, or when the client no longer reads it.
    """

    def __init__(
        self,
        session_id: str,
        trace_id: str,
        stream: Stream | Resuming,
        cancel: Callable[[bool], None],
        span: ClientSpan,
    ) -> None:
        self._span = span
        self.session_id = session_id
        self._trace_id = trace_id
        self._stream = stream
        self._cancel = cancel
        self._ended = False
        self._done = False
        self._first: Event | None = None
        self._arrivals: Arrivals | None = None

    def accepted(self) -> None:
        """Send the trace and wait until the server accepts it.

        Raises:
            InterposeError: the server refused the trace.
        """
        self._arrivals = self._stream.events()
        self._first = self.next()

    def next(self) -> Event | None:
        """Wait for the next event; return None when the trace is done.

        Raises:
            InterposeError: the trace as a whole failed.
        """
        if (event := self._held()) is not None:
            return event
        assert self._arrivals is not None
        try:
            return self._event(self._arrivals.take())
        except InterposeError as error:
            raise self._failed(error) from error.__cause__

    async def next_async(self) -> Event | None:
        """Do the same as `next`, on an event loop."""
        if (event := self._held()) is not None:
            return event
        assert self._arrivals is not None
        try:
            return self._event(await self._arrivals.take_async())
        except InterposeError as error:
            raise self._failed(error) from error.__cause__

    def close(self, wait: bool = True) -> None:
        """Stop reading; a trace that has not ended is cancelled on the server. Idempotent."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(Unavailable):  # a closed client has closed all its traces
                self._stream.cancel()
                self._cancel(wait)
        self._span.end()
        self._drop_arrivals()

    def leave(self) -> None:
        """Stop reading the events of a job, which goes on without its client."""
        self._ended = True
        self._span.end()
        self._drop_arrivals()
        with contextlib.suppress(Unavailable):
            self._stream.cancel()

    def _drop_arrivals(self) -> None:
        if self._arrivals is not None:
            self._arrivals.close()

    def _held(self) -> Event | None:
        event, self._first = self._first, None
        return event

    def _event(self, event: Event | None) -> Event | None:
        if event is None:
            if not self._done:
                raise Unavailable("the server ended the trace without finishing it")
            return None
        self._done = self._ended = event.WhichOneof("kind") == "done"
        if self._done:
            self._span.end()
        return event

    def _failed(self, error: InterposeError) -> InterposeError:
        self._ended = True
        error.trace_id = error.trace_id or self._trace_id
        self._span.end(error)
        return error
