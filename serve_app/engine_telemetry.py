"""What an engine replica tells operators: spans of its traces, counters of its workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from actors.telemetry.options import Options
from actors.telemetry.spans import Span
from actors.telemetry.telemetry import Telemetry
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart, kind_of
from interpose.wire.request import TraceRequest

# Seconds between two questions to the workers.
ASK_SECONDS = 5.0


class EngineTelemetry(Telemetry):
    """What an engine replica tells operators.

    The workers are asked for their counters beside their steps, every few seconds, and not while no trace comes.

    Args:
        options: what is written, and where.

    Attributes:
        counters: the counters and gauges of the workers by name, as last asked.
    """

    def __init__(self, options: Options | None = None) -> None:
        super().__init__("engine", options)
        self.counters: Mapping[str, float] = {}
        self._stale = True  # a trace has come since the workers were asked
        self._asked = 0.0

    async def look(self, engine: Any) -> None:
        """Ask the workers, if it is time.

        Args:
            engine: the `TraceEngine`; None while there is none.
        """
        if engine is None or not self._stale or time.monotonic() - self._asked < ASK_SECONDS:
            return
        self._stale, self._asked = bool(sum(engine.load())), time.monotonic()
        with contextlib.suppress(Exception):  # a dead engine is noticed elsewhere
            self.counters = await engine.counters()

    async def spanned(self, request: TraceRequest, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield a trace's events within a span; each block is a span of the worker that ran it."""
        self._stale = True
        span = self.spans.begin("engine", request.traceparent, trace=request.trace_id, tenant=request.tenant)
        failed = ""
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if self.spans.on:
                        _tell_blocks(span, event)
                    yield event
        except Exception as error:
            failed = type(error).__name__
            raise
        finally:
            span.end(failed)


def _tell_blocks(span: Span, event: bytes) -> None:
    """Make the spans of the blocks whose accounts are in an event."""
    for data in apart(event):
        if kind_of(data) == "accounting":
            account = pb.Event.FromString(data).accounting
            tiers = {f"steps.{count.tier}": count.steps for count in account.tiers}
            span.child("worker", account.seconds, invoke=account.invoke, block_seconds=account.block_seconds, **tiers)
