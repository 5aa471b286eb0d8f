"""What outlives a session's actor: traces with their results, and the variables that they share.

It lies with the directory, which also owns the saved tensors. A session says what a trace came to before its client hears of
it; when the session's actor dies, another one takes over all that it had said.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.protocol import Order
from actors.saved import Saved
from actors.trace_progress import TraceProgress
from actors.variables import Copy
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class KeptTrace:
    """One trace, as another actor can go on with it.

    Attributes:
        order: what was to run.
        key: its name inside the service.
        progress: how far it came.
        clock: that of the process which noted the progress, see `clock`.
        events: its serialized events.
        failure: why it failed as a whole, if it did; of one that has begun, why it will have if nothing else is said of it.
        blobs: its saved values, by blob id.
        again: values of earlier traces that it saved as they were, by blob id.
    """

    order: Order
    key: str
    progress: TraceProgress
    clock: float
    events: tuple[bytes, ...] = field(repr=False)
    failure: pb.Failure | None
    blobs: Mapping[str, Saved] = field(repr=False)
    again: Mapping[str, Saved] = field(repr=False)


@dataclass
class Kept:
    """What one session keeps.

    Attributes:
        kept: whether it was opened to be kept.
        left: whether its client has gone and left it its jobs.
        traces: by their keys, in the order in which they began.
        variables: the copies that count, by id.
    """

    kept: bool
    left: bool = False
    traces: dict[str, KeptTrace] = field(default_factory=dict)
    variables: dict[str, Copy] = field(default_factory=dict)


class Archive:
    """What sessions keep, by session id, from the beginning of their lease to its end."""

    def __init__(self) -> None:
        self._sessions: dict[str, Kept] = {}

    def begin(self, session_id: str, kept: bool) -> None:
        """A session is lent."""
        self._sessions[session_id] = Kept(kept)

    def leave(self, session_id: str) -> None:
        """Its client has gone and left it its jobs."""
        if (held := self._sessions.get(session_id)) is not None:
            held.left = True

    def keep(self, session_id: str, trace: KeptTrace, variables: Mapping[str, Copy]) -> None:
        """Keep a trace, and what it left of variables; ignored when the lease has ended."""
        if (held := self._sessions.get(session_id)) is not None:
            held.traces[trace.key] = trace
            held.variables.update(variables)

    def drop(self, session_id: str, key: str) -> None:
        """Drop a trace."""
        if (held := self._sessions.get(session_id)) is not None:
            held.traces.pop(key, None)

    def drop_variables(self, session_id: str) -> None:
        """Drop the variables."""
        if (held := self._sessions.get(session_id)) is not None:
            held.variables.clear()

    def of(self, session_id: str) -> Kept:
        """Return what a session keeps."""
        return self._sessions[session_id]

    def end(self, session_id: str) -> None:
        """The lease has ended, and with it everything. Idempotent."""
        self._sessions.pop(session_id, None)


def clock() -> float:
    """How far this process's monotonic clock is behind the time of day, in seconds; other machines' are elsewhere."""
    return time.time() - time.monotonic()
