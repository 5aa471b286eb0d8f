"""Notices that an actor is gone while its calls run here.

A call goes on when its caller dies, and nothing else would end it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import ray

from actors.naming import NAMESPACE

T = TypeVar("T")

# The namespace of the replicas of deployments.
_SERVE = "serve"


def this_caller() -> str:
    """Return this replica of Serve's as a caller: its namespace in Ray, a slash, and its name."""
    return f"{_SERVE}/{ray.get_runtime_context().get_actor_name()}"


class CallerWatch:
    """The actors whose calls run in this process."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._lost: dict[str, asyncio.Future[None]] = {}

    async def while_alive(self, caller: str, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield from a generator until it ends or the caller is gone.

        The generator is closed then.

        Args:
            caller: the Ray name of a session actor, or another actor's name as `this_caller` gives it.
        """
        lost = self._lost.setdefault(caller, asyncio.get_running_loop().create_future())
        self._calls[caller] += 1
        try:
            async with contextlib.aclosing(items):
                while True:
                    step = asyncio.ensure_future(anext(items, None))
                    try:
                        either: set[asyncio.Future[Any]] = {step, lost}
                        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not step.done():
                            await _cancelled(step)
                    if step.cancelled() or (item := step.result()) is None:
                        return
                    yield item
        finally:
            self._calls[caller] -= 1
            if not self._calls[caller]:
                del self._calls[caller], self._lost[caller]

    async def look(self) -> None:
        """Find out which callers are gone; the process calls this periodically."""
        for caller in list(self._calls):
            if not await asyncio.to_thread(_exists, caller) and caller in self._lost:
                lost = self._lost[caller]
                if not lost.done():
                    lost.set_result(None)


def _exists(caller: str) -> bool:
    namespace, slash, name = caller.partition("/")
    try:
        ray.get_actor(name if slash else caller, namespace=namespace if slash else NAMESPACE)
    except ValueError:
        return False
    return True


async def _cancelled(task: asyncio.Future[T]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
