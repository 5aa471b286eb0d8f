"""What one session holds: traces, uploads, variables, saved values; their room and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from actors.failures import not_found
from actors.protocol import Terms
from actors.saved import Saved
from actors.trace_run import TraceRun
from actors.uploads import Uploads
from actors.variables import SharedVariables
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb

MAX_TRACES = 10_000  # traces that a session knows, however small


class SessionStore:
    """Holds the values of one lease until they expire, or until other values need their room.

    Args:
        session_id: the lease; "" before the first lease.
        kept: whether the client may go and come back for the values.
        terms: how much is held, and for how long.
        directory: handle of the directory.

    Attributes:
        traces: the session's traces by their ids.
        by_key: the same traces by their keys.
        uploads: the blobs that the client has uploaded.
        variables: the session's variables.
        forgotten: whether the session may hold values of forgotten traces.
        touched: when the client last used the session, on the monotonic clock.
    """

    def __init__(self, session_id: str, kept: bool, terms: Terms, directory: Any) -> None:
        self.session_id = session_id
        self.kept = kept
        self.terms = terms
        self.traces: dict[str, TraceRun] = {}
        self.by_key: dict[str, TraceRun] = {}
        self.uploads = Uploads(directory, session_id)
        self.variables = SharedVariables()
        self.forgotten = False
        self.touched = time.monotonic()
        self._directory = directory
        # Looking at each trace of a session for each new trace would take long in a session of thousands.
        self._running: dict[str, TraceRun] = {}  # by key; some may have ended since
        self._ended: dict[str, int] = {}  # the bytes of traces that have ended, by key
        self._ended_bytes = 0

    def add(self, run: TraceRun) -> None:
        """Hold a trace."""
        self.traces[run.id] = self.by_key[run.key] = self._running[run.key] = run

    def running(self) -> list[TraceRun]:
        """Return the traces that wait or run."""
        return [run for run in self._running.values() if run.running]

    @property
    def collected(self) -> bool:
        """Whether the client would lose nothing with the session.

        Uploads do not count: the client sends them again.
        """
        nothing_shared = not self.kept and not self.variables.size
        return nothing_shared and all(run.collected for run in self.traces.values())

    def saved(self, blob_id: str) -> Saved:
        """Return a saved value; a later trace than the value's own may have kept it."""
        run = self.by_key.get(blob_id.partition("/")[0])
        for blobs in (run.arrivals.blobs if run is not None else {}, self._shared_again()):
            if blob_id in blobs:
                return blobs[blob_id]
        raise self.gone(f"saved value {blob_id}")

    def _shared_again(self) -> dict[str, Saved]:
        """The saved values in variables, and values that later traces saved again, by blob id."""
        return self.variables.blobs | {name: saved for run in self.traces.values() for name, saved in run.again.items()}

    def gone(self, what: str) -> ServiceFailure:
        """Return the error for a trace or a value that is not here."""
        since = "after the session was last used" if self.kept else "after the trace has ended"
        return not_found(
            f"there is no {what} (any more): values are kept for {self.terms.retention_seconds:g} s {since}"
        )

    def expires_at(self, run: TraceRun) -> float | None:
        """When a trace's values expire, on the monotonic clock; None while the trace runs."""
        if run.ended_at is None:
            return None
        return (max(run.ended_at, self.touched) if self.kept else run.ended_at) + self.terms.retention_seconds

    def kept_for(self, run: TraceRun) -> bool:
        """Whether a client may come back for the values of a trace."""
        expires_at = self.expires_at(run)
        return run.request.keep and (expires_at is None or expires_at > time.monotonic())

    def stored_bytes(self) -> int:
        """Return the bytes of all values and uploads."""
        for run in [run for run in self._running.values() if not run.running]:
            del self._running[run.key]
            self._ended[run.key] = run.stored_bytes  # which changes no more
            self._ended_bytes += run.stored_bytes
        held = self._ended_bytes + sum(run.stored_bytes for run in self._running.values()) + self.variables.size
        if self.forgotten:
            left = self._shared_again().items()
            held += sum(saved.size for name, saved in left if name.partition("/")[0] not in self.by_key)
        return held + self.uploads.stored_bytes

    def no_room(self, size: int, traces: int = 0) -> pb.Failure | None:
        """Make room for `size` more bytes and `traces` more traces.

        Values that no client comes back for are dropped, oldest first. Returns a refusal if that is not enough.
        """

        def full() -> bool:
            return len(self.traces) + traces > MAX_TRACES or self.stored_bytes() + size > self.terms.stored_bytes

        if not full():
            return None
        self._drop_left_over(full)
        if not full():
            return None
        capacity = self.terms.stored_bytes
        message = (
            f"the session holds {self.stored_bytes()} bytes of {len(self.traces)} traces and may hold {capacity} of "
            f"{MAX_TRACES}, which leaves no room for {size} more: save less, or close it and open another session"
        )
        if any(not run.running for run in self.traces.values()):
            message += (
                f"; results of jobs and of kept sessions go by themselves after {self.terms.retention_seconds:g} s"
            )
        frees_in = self.frees_in()
        wait = max(1.0, frees_in if math.isfinite(frees_in) else 0.0)
        return failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=wait)

    def shed(self, size: int) -> bool:
        """Drop values that no client comes back for, until `size` bytes are free.

        Returns:
            Whether there were any.
        """
        before = self.stored_bytes()
        self._drop_left_over(lambda: self.stored_bytes() > before - size)
        return self.stored_bytes() < before

    def _drop_left_over(self, wanted: Callable[[], bool]) -> None:
        """Drop values that no client comes back for, oldest first, as long as room is wanted."""
        left_over = [run for run in self.traces.values() if not run.running and not self.kept_for(run)]
        left_over.sort(key=lambda run: run.ended_at or 0)
        while left_over and wanted():
            self.forget(left_over.pop(0))

    def frees_in(self) -> float:
        """Return the seconds until the first values expire; infinite if none will."""
        now = time.monotonic()
        until = [expires_at - now for run in self.traces.values() if (expires_at := self.expires_at(run)) is not None]
        return max(0.0, min(until, default=math.inf))

    def forget(self, run: TraceRun | None) -> None:
        """Drop a trace and its values."""
        if run is not None:
            self.traces.pop(run.id, None)
            self.by_key.pop(run.key, None)
            self._running.pop(run.key, None)
            self._ended_bytes -= self._ended.pop(run.key, 0)
            self.forgotten = True
            self._directory.drop.remote(self.session_id, run.key)

    def sweep(self) -> None:
        """Drop values that have expired; called periodically."""
        now = time.monotonic()
        for run in list(self.traces.values()):
            expires_at = self.expires_at(run)
            if expires_at is not None and expires_at < now:
                self.forget(run)
        if self.variables.size and not self.traces and self.touched + self.terms.retention_seconds < now:
            self.variables.clear()
            self._directory.drop_variables.remote(self.session_id)
