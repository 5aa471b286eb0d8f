"""A queue of messages from the thread that reads a call to a thread or an event loop.

The reading thread waits while the queue is full. So a slow reader slows down the call, and the memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

AHEAD = 64  # messages that are read ahead


class Arrivals:
    """The queue of a call's messages, with one reading thread and one reader.

    Args:
        read: iterates over the messages, in a thread that the constructor starts.
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
        """Wait for the next message and return it, None after the last message.

        An exception of the reading thread is raised here.
        """
        return self._taken(*self._arrived.get())

    async def take_async(self) -> Any:
        """Do the same as `take`, on an event loop."""
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
        """Stop taking messages; the reading thread drops later messages."""
        self._wanted = False

    def _taken(self, kind: str, item: Any) -> Any:
        self._free.release()
        if kind == "message":
            return item
        self._arrived.put((kind, item))  # every later call ends the same way
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
    """Do nothing: no event loop waits for a message."""


def _set(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
