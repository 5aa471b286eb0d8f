"""Reads the events of a session's stream, as a client does."""

from __future__ import annotations

from collections.abc import AsyncIterator

from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart


async def events_of(stream: AsyncIterator[bytes]) -> list[pb.Event]:
    """Return all events of a stream, whether they come alone or in bundles."""
    return [pb.Event.FromString(data) async for bundle in stream for data in apart(bundle)]
