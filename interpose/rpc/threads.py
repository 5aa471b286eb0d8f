"""The bridge to asyncio: a blocking call runs in its own thread and is awaited."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

from interpose.contract.errors import InterposeWarning

T = TypeVar("T")


def warn_if_on_a_loop(written: str, better: str) -> None:
    """Warn that a call blocks the event loop of this thread, if a loop is running.

    Only models of a client for asyncio call this. The cells of a notebook always run on a loop, and may block the loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    message = f"{written} blocks the event loop until the trace is done; write {better}"
    warnings.warn(message, InterposeWarning, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Return the `stacklevel` of the first frame that is not code of `interpose`."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "interpose":
        depth, frame = depth + 1, frame.f_back
    return depth


async def in_thread(call: Callable[..., T], *args: object, dropped: Callable[[T], object] | None = None) -> T:
    """Run a blocking call in a new thread and return its result.

    There is no pool of threads, because every running trace may have a waiting call.

    Args:
        call: the blocking function.
        args: its arguments.
        dropped: is called with the result if the task was cancelled before the call returned.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not done.cancelled():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]
        elif error is None and dropped is not None:
            dropped(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call(*args)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="interpose-call", daemon=True).start()
    return await done
