"""Decides which traces an engine replica runs at a time.

A replica has a fixed number of seats. Each tenant may hold a bounded share of them. The other traces wait for their turn:
first the tenant that has had the fewest tokens for its weight (`actors.shares`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from executor.core.fairness import Flow
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from serve_app.tenants.turns import Turns

# The assumed duration of a trace before any trace has ended.
_FIRST_SECONDS = 1.0
# The weight of the last trace's duration in the running mean.
_WEIGHT = 0.2


@dataclass(eq=False)
class Seat:
    """The seat of a trace.

    Attributes:
        tokens: tokens that the trace may need.
        used: tokens that the trace has used; None if they are not known.
    """

    tokens: float = 1
    used: float | None = None


@dataclass(eq=False)
class _Waiting:
    flow: Flow
    seat: Seat
    state: Literal["waits", "runs", "gone"] = "waits"
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
        self._running: Counter[str] = Counter()  # traces that have a seat, by tenant
        self._queues: dict[Flow, deque[_Waiting]] = {}  # without empty queues
        self._turns = Turns()
        self._seconds = _FIRST_SECONDS

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @contextlib.asynccontextmanager
    async def seat(self, flow: Flow, tokens: int = 1) -> AsyncIterator[Seat]:
        """Wait for a seat and hold it.

        Args:
            flow: the tenant and the session of the trace.
            tokens: tokens that the trace may need.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, too many of the tenant's traces wait already.
        """
        waiting = _Waiting(flow, Seat(max(1, tokens)))
        self._refuse(flow)
        self._queues.setdefault(flow, deque()).append(waiting)
        self._turns.enter(flow)
        self._serve()
        try:
            await waiting.turn
        except BaseException:
            if waiting.state == "runs":  # the trace got its seat in the meantime
                waiting.seat.used = 0
                self._leave(waiting)
            elif waiting.state == "waits":
                self._give_up(waiting)
            raise
        began = time.monotonic()
        try:
            yield waiting.seat
        finally:
            self._seconds += _WEIGHT * (time.monotonic() - began - self._seconds)
            self._leave(waiting)

    def _most(self, flow: Flow) -> int:
        return max(1, int(self._seats * flow.share))

    def _refuse(self, flow: Flow) -> None:
        held = sum(len(queue) for other, queue in self._queues.items() if other.tenant == flow.tenant)
        if held < self._most_waiting:
            return
        retry_after = max(1.0, self._seconds / self._most(flow))
        message = (
            f"{held} traces of {flow.tenant or 'this tenant'} wait for the engine already, which is the limit "
            "(the model's max_waiting_traces): try again when some have run"
        )
        raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=retry_after))

    def _leave(self, trace: _Waiting) -> None:
        """Free the seat of a trace."""
        flow, seat = trace.flow, trace.seat
        self._running[flow.tenant] -= 1
        self._running = +self._running
        self._turns.end(flow, seat.tokens, seat.tokens if seat.used is None else seat.used)
        self._turns.leave(flow)
        self._serve()

    def _serve(self) -> None:
        """Give free seats to waiting traces, in turn."""
        while self._queues and self._running.total() < self._seats:
            able = [flow for flow in self._queues if self._running[flow.tenant] < self._most(flow)]
            if not able:
                return
            chosen = self._queues[self._turns.next(able)][0]
            if chosen.turn.done():  # the waiting call was cancelled a moment ago
                self._give_up(chosen)
                continue
            self._remove(chosen)
            self._running[chosen.flow.tenant] += 1
            self._turns.start(chosen.flow, chosen.seat.tokens)
            chosen.state = "runs"
            chosen.turn.set_result(None)

    def _give_up(self, trace: _Waiting) -> None:
        trace.state = "gone"
        self._remove(trace)
        self._turns.leave(trace.flow)

    def _remove(self, trace: _Waiting) -> None:
        queue = self._queues[trace.flow]
        queue.remove(trace)
        if not queue:
            del self._queues[trace.flow]
