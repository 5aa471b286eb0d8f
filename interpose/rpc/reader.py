"""Messages on their way from the thread that reads a call to whoever takes them, in a thread or on an event loop.

The reading thread waits while too many lie here, so that a slow reader slows the call down instead of filling its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

AHEAD = 64  # messages read before they are asked for


class Arrivals:
    """What has arrived and has not been taken; one thread puts, one reader takes.

    Args:
        read: iterates over the messages; it runs in a thread of its own, which this starts.
    """

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._free = threading.Semaphore(AHEAD)
        self._wanted = True
        self._wake: Callable[[], object] = _nobody
        threading.Thread(target=self._run, args=(read,), name="interpose-reader", daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all messages."""
        while (message := self.take()) is not None:
            yield message

    def take(self) -> Any:
        """Wait for the next message and return it, None after the last; raises what reading raised."""
        return self._taken(*self._arrived.get())

    async def take_async(self) -> Any:
        """The same, on an event loop."""
        loop = asyncio.get_running_loop()
        while True:
            arrived: asyncio.Future[None] = loop.create_future()
            self._wake = functools.partial(loop.call_soon_threadsafe, _set, arrived)
            try:
                return self._taken(*self._arrived.get_nowait())
            except queue.Empty:
                await arrived
            finally:
                self._wake = _nobody

    def close(self) -> None:
        """Nobody takes any more; what is still read is dropped."""
        self._wanted = False

    def _taken(self, kind: str, item: Any) -> Any:
        self._free.release()
        if kind == "message":
            return item
        self._arrived.put((kind, item))  # it ends the same way however often it is asked
        if kind == "error":
            raise item
        return None

    def _run(self, read: Callable[[], Iterator[Any]]) -> None:
        try:
            for message in read():
                self._put("message", message)
            self._put("end", None)
        except BaseException as error:
            self._put("error", error)

    def _put(self, kind: str, item: Any) -> None:
        while not self._free.acquire(timeout=0.5):
            if not self._wanted:
                return
        self._arrived.put((kind, item))
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._wake()


def _nobody() -> None:
    """Is woken when nobody waits."""


def _set(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
