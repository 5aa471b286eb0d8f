"""The events of one trace over as many connections as it takes: when one breaks, the next goes on where it was.

The server keeps a trace's events from the first on and lets it run for some seconds without a reader, so that a client that
comes back misses nothing and nothing runs twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from interpose.contract.errors import Cancelled, ConnectionLost, NotFound
from interpose.rpc.channel import Stream
from interpose.rpc.reader import Arrivals
from interpose.rpc.transfer import BACKOFF_SECONDS


class Resuming:
    """A call that streams events, as `Stream` is, which survives breaks of the connection after its first event.

    Args:
        first: the call that submits the trace.
        again: returns a call for all events of the trace but so many.
    """

    def __init__(self, first: Stream, again: Callable[[int], Stream]) -> None:
        self._stream = first
        self._again = again
        self._lock = threading.Lock()
        self._left = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        """Iterate in this thread, which must not be one that an interrupt can hit.

        Raises:
            ConnectionLost: it broke and did not come back, or came back when the server had given the trace up.
            InterposeError: the trace as a whole failed.
        """
        seen = 0
        attempt = 0
        lost: ConnectionLost | None = None
        while True:
            try:
                for event in self._stream:
                    seen, attempt = seen + 1, 0
                    yield event
                    if event.WhichOneof("kind") == "done":
                        return
                raise ConnectionLost("the server ended the trace without finishing it")
            except ConnectionLost as error:
                if not seen or attempt >= len(BACKOFF_SECONDS):
                    raise
                lost = error
            except (Cancelled, NotFound):
                if lost is None or self._left.is_set():
                    raise
                raise lost from None
            if self._left.wait(BACKOFF_SECONDS[attempt]):
                raise lost
            attempt += 1
            with self._lock:
                self._stream = self._again(seen)
                if self._left.is_set():
                    self._stream.cancel()

    def events(self) -> Arrivals:
        """Begin, and read small messages ahead in a thread of their own, for any thread or an event loop to take."""
        return Arrivals(lambda: iter(self))

    def cancel(self) -> None:
        """End the call from this side; does nothing when it has ended."""
        with self._lock:
            self._left.set()
            self._stream.cancel()
