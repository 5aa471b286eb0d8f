"""Notices that a session actor is gone while an engine runs its traces.

Nothing else would cancel these traces.
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


class SessionWatch:
    """The session actors whose traces run on this replica."""

    def __init__(self) -> None:
        self._traces: Counter[str] = Counter()
        self._lost: dict[str, asyncio.Future[None]] = {}

    async def while_alive(self, session: str, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield from a generator until it ends or the session actor is gone.

        The generator is closed then.

        Args:
            session: the Ray name of the session actor.
        """
        lost = self._lost.setdefault(session, asyncio.get_running_loop().create_future())
        self._traces[session] += 1
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
            self._traces[session] -= 1
            if not self._traces[session]:
                del self._traces[session], self._lost[session]

    async def look(self) -> None:
        """Find out which session actors are gone; the replica calls this periodically."""
        for session in list(self._traces):
            if not await asyncio.to_thread(_exists, session) and session in self._lost:
                lost = self._lost[session]
                if not lost.done():
                    lost.set_result(None)


def _exists(session: str) -> bool:
    try:
        ray.get_actor(session, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


async def _cancelled(task: asyncio.Future[T]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
