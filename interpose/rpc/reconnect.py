"""The events of one trace over several connections, where a connection may break.

The server keeps the events of a trace, and lets the trace run for some seconds without a reader. So a client that connects
again misses no event, and nothing runs twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from interpose.contract.errors import Cancelled, ConnectionLost, InterposeError, NotFound
from interpose.rpc.channel import Stream
from interpose.rpc.reader import Arrivals
from interpose.rpc.transfer import BACKOFF_SECONDS


class Resuming:
    """A `Stream` of events that survives breaks of the connection after its first event.

    Args:
        first: the call that submits the trace.
        again: returns a call for the events of the trace after the first n; its argument is n.
    """

    def __init__(self, first: Stream, again: Callable[[int], Stream]) -> None:
        self._stream = first
        self._again = again
        self._lock = threading.Lock()
        self._left = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the events in this thread, which must not be the main thread.

        Raises:
            ConnectionLost: the connection broke and did not come back, or came back after the server had dropped the trace.
            InterposeError: the trace as a whole failed.
        """
        seen = 0
        attempt = 0
        done = False
        lost: ConnectionLost | None = None
        while True:
            try:
                for event in self._stream:
                    seen, attempt = seen + 1, 0
                    yield event
                    # The call is read to its end. A call that is dropped before its end looks to the server like a client that
                    # has gone.
                    done = done or event.WhichOneof("kind") == "done"
                if done:
                    return
                raise ConnectionLost("the server ended the trace without finishing it")
            except InterposeError as error:
                if done:
                    return  # all that matters has come
                if isinstance(error, Cancelled | NotFound) and lost is not None and not self._left.is_set():
                    raise lost from None
                if not isinstance(error, ConnectionLost) or not seen or attempt >= len(BACKOFF_SECONDS):
                    raise
                lost = error
            if self._left.wait(BACKOFF_SECONDS[attempt]):
                raise lost
            attempt += 1
            with self._lock:
                self._stream = self._again(seen)
                if self._left.is_set():
                    self._stream.cancel()

    def events(self) -> Arrivals:
        """Start the call and read its events ahead, in a new thread.

        Any thread or an event loop takes the events.
        """
        return Arrivals(lambda: iter(self))

    def cancel(self) -> None:
        """Cancel the call; a call that has ended is left alone."""
        with self._lock:
            self._left.set()
            self._stream.cancel()
