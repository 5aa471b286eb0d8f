"""What outlives a session actor: traces with their results, and the session variables.

The archive lies with the directory, which also owns the saved tensors. A session stores a trace's outcome here before the
client hears of it. When the session actor dies, another actor takes over everything that is stored here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.saved import Saved
from actors.trace_progress import TraceProgress
from actors.variables import Copy
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest


@dataclass(frozen=True)
class KeptTrace:
    """One trace, with all that another actor needs to go on with it.

    Attributes:
        request: the trace, without its standing edits.
        progress: how far the trace came.
        clock: clock offset of the process that noted the progress (see `clock`).
        events: the trace's serialized events.
        failure: why the trace failed as a whole, if it did. For a trace that runs: the failure that it gets if nothing further
            is stored.
        blobs: the trace's saved values, by blob id.
        again: values of earlier traces that the trace saved unchanged, by blob id.
    """

    request: TraceRequest
    progress: TraceProgress
    clock: float
    events: tuple[bytes, ...] = field(repr=False)
    failure: pb.Failure | None
    blobs: Mapping[str, Saved] = field(repr=False)
    again: Mapping[str, Saved] = field(repr=False)


@dataclass
class Kept:
    """What the archive holds of one session.

    Attributes:
        kept: whether the session was opened to be kept.
        left: whether the client has gone and left its jobs running.
        traces: the session's traces by their keys, in the order in which they began.
        variables: the authoritative copies of session variables, by id.
    """

    kept: bool
    left: bool = False
    traces: dict[str, KeptTrace] = field(default_factory=dict)
    variables: dict[str, Copy] = field(default_factory=dict)


class Archive:
    """What the archive holds of all sessions, by session id.

    An entry lives from the beginning of a session's lease to its end.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Kept] = {}

    def begin(self, session_id: str, kept: bool) -> None:
        """Note that a session has been lent."""
        self._sessions[session_id] = Kept(kept)

    def leave(self, session_id: str) -> None:
        """Note that the client has gone and left its jobs running."""
        if (held := self._sessions.get(session_id)) is not None:
            held.left = True

    def keep(self, session_id: str, trace: KeptTrace, variables: Mapping[str, Copy]) -> None:
        """Store a trace and its session variables; ignored when the lease has ended."""
        if (held := self._sessions.get(session_id)) is not None:
            held.traces[trace.request.key] = trace
            held.variables.update(variables)

    def drop(self, session_id: str, key: str) -> None:
        """Drop a trace of a session."""
        if (held := self._sessions.get(session_id)) is not None:
            held.traces.pop(key, None)

    def drop_variables(self, session_id: str) -> None:
        """Drop a session's variables."""
        if (held := self._sessions.get(session_id)) is not None:
            held.variables.clear()

    def of(self, session_id: str) -> Kept:
        """Return what is stored of a session."""
        return self._sessions[session_id]

    def end(self, session_id: str) -> None:
        """Drop everything of a session whose lease has ended. Idempotent."""
        self._sessions.pop(session_id, None)


def clock() -> float:
    """Return the seconds that this process's monotonic clock is behind the time of day.

    Monotonic clocks of different machines begin at different times.
    """
    return time.time() - time.monotonic()
