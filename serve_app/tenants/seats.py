"""Decides which traces an engine replica runs at a time.

A replica has a fixed number of seats. Each tenant may hold a bounded share of them. The other traces wait for their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from executor.core.fairness import Flow, in_turn
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb

# The assumed duration of a trace before any trace has ended.
_FIRST_SECONDS = 1.0
# The weight of the last trace's duration in the running mean.
_WEIGHT = 0.2


@dataclass(eq=False)
class _Waiting:
    flow: Flow
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Seats:
    """The seats for traces on one replica.

    Args:
        seats: traces that run at a time.
        most_waiting: traces of one tenant that may wait.

    Attributes:
        waiting: traces that wait now.
    """

    def __init__(self, seats: int, most_waiting: int) -> None:
        self._seats = seats
        self._most_waiting = most_waiting
        self._running: list[Flow] = []
        self._waiting: list[_Waiting] = []
        self._seconds = _FIRST_SECONDS

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def seat(self, flow: Flow) -> AsyncIterator[None]:
        """Wait for a seat and hold it.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, too many of the tenant's traces wait already.
        """
        waiting = _Waiting(flow)
        self._refuse(flow)
        self._waiting.append(waiting)
        self._serve()
        try:
            await waiting.turn
        except BaseException:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # the trace got its seat in the meantime
                self._leave(flow)
            raise
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds += _WEIGHT * (time.monotonic() - began - self._seconds)
            self._leave(flow)

    def _most(self, flow: Flow) -> int:
        return max(1, int(self._seats * flow.share))

    def _refuse(self, flow: Flow) -> None:
        held = sum(one.flow.tenant == flow.tenant for one in self._waiting)
        if held < self._most_waiting:
            return
        retry_after = max(1.0, self._seconds / self._most(flow))
        message = (
            f"{held} traces of {flow.tenant or 'this tenant'} wait for the engine already, which is the limit "
            "(the model's max_waiting_traces): try again when some have run"
        )
        raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=retry_after))

    def _leave(self, flow: Flow) -> None:
        self._running.remove(flow)
        self._serve()

    def _serve(self) -> None:
        """Give free seats to waiting traces, in turn."""
        while self._waiting and len(self._running) < self._seats:
            able = [one for one in self._waiting if self._held(one.flow.tenant) < self._most(one.flow)]
            if not able:
                return
            chosen = in_turn(able, lambda one: one.flow, self._running)[0]
            self._waiting.remove(chosen)
            if not chosen.turn.done():  # otherwise the waiting call was cancelled a moment ago
                self._running.append(chosen.flow)
                chosen.turn.set_result(None)

    def _held(self, tenant: str) -> int:
        return sum(flow.tenant == tenant for flow in self._running)
