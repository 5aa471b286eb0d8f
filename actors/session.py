"""A session: holds a client's uploads, traces and saved values until they expire.

A session actor (`actors.session_host`) holds many sessions. Workers' messages carry a trace's key; messages with an unknown
key are ignored. State that must outlive the actor lies with the directory too (`actors.archive`).

Size: a method for each call of the ingress and for each message of the workers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any

import ray

from actors.archive import Kept, KeptTrace
from actors.failures import not_found
from actors.protocol import Route, SessionStats, Terms
from actors.saved import Saved
from actors.spilled import put
from actors.trace_run import TraceRun
from actors.upload import Upload
from actors.variables import Copy, SharedVariables
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest

if TYPE_CHECKING:
    from actors.engine_stream import EngineCalls

# Seconds that a trace runs on when its client is gone. Clients come back within four seconds.
RECONNECT_SECONDS = 5.0
MAX_TRACES = 10_000  # traces that a session knows, however small


class Session:
    """State of one session; every method runs on the session actor's event loop.

    Args:
        engines: calls the engines.
        directory: handle of the directory.
        terms: the terms until the session is opened.
    """

    def __init__(self, engines: EngineCalls, directory: Any, terms: Terms) -> None:
        self._terms = terms
        self._directory = directory
        self._engines = engines
        self._clear("")

    def _clear(self, session_id: str, kept: bool = False) -> None:
        self._id = session_id
        self._kept = kept
        self._left = False
        self._traces: dict[str, TraceRun] = {}
        self._by_key: dict[str, TraceRun] = {}
        self._uploads: dict[str, Upload] = {}
        self._uploaded: dict[str, tuple[ray.ObjectRef, int]] = {}
        self._variables = SharedVariables()
        self._forgotten = False  # whether the session may hold values of forgotten traces
        self._done = 0
        self._touched = time.monotonic()

    # The directory's side

    async def open(self, session_id: str, kept: bool, terms: Terms) -> None:
        """Begin a lease; everything of an earlier lease is dropped.

        Args:
            kept: whether the client may go and come back for the values.
            terms: terms of this lease.
        """
        await self.close()
        self._terms = terms
        self._clear(session_id, kept)

    async def restore(self, session_id: str, kept: Kept, terms: Terms) -> None:
        """Go on with a lease whose actor is dead."""
        await self.open(session_id, kept.kept, terms)
        self._left = kept.left
        for trace in kept.traces.values():
            run = TraceRun.restored(trace, self._no_room, self._keep, self._variables)
            self._traces[run.id] = self._by_key[run.key] = run
        self._variables.keep(kept.variables)
        self._forgotten = True
        self._done = len(self._traces)

    async def leave_jobs(self) -> bool:
        """Note that the client goes and leaves only its jobs; return whether there are any.

        The session becomes idle for good when its last job has ended and the job's values have gone.
        """
        self._left = True
        for run in list(self._traces.values()):
            if not run.request.job:
                await run.cancel()
                self._forget(run)
        return bool(self._traces)

    async def close(self) -> SessionStats:
        """End the lease: cancel its traces and drop its values.

        Returns:
            What the session held and did.
        """
        await asyncio.gather(*(run.cancel() for run in self._traces.values()))
        stats = await self.stats()
        self._clear("")
        return stats

    async def stats(self) -> SessionStats:
        """Return what the session holds and does."""
        running = sum(run.running for run in self._traces.values())
        idle = math.inf if self._left else time.monotonic() - self._touched
        return SessionStats(
            idle_seconds=0.0 if any(run.running or self._kept_for(run) for run in self._traces.values()) else idle,
            traces_running=running,
            traces_done=self._done,
            stored_bytes=self._stored(),
            collected=self._collected,
        )

    @property
    def _collected(self) -> bool:
        """Whether the client would lose nothing with the session.

        Uploads do not count: the client sends them again.
        """
        nothing_shared = not self._kept and not self._variables.size
        return self._left or (nothing_shared and all(run.collected for run in self._traces.values()))

    # The client's side, through the ingress

    async def upload(self, session_id: str, digest: str, size: int, offset: int, data: bytes) -> int:
        """Store one chunk of a blob; an empty chunk asks how many bytes are here.

        Returns:
            Bytes held so far; `size` means that the blob is complete and its digest right.

        Raises:
            ServiceFailure: INVALID_ARGUMENT, QUOTA_EXCEEDED, or NOT_FOUND for a lease that has ended.
        """
        self._check(session_id)
        if digest in self._uploaded:
            return self._uploaded[digest][1]
        upload = self._uploads.get(digest)
        if upload is None:
            refusal = self._no_room(size)
            if refusal is not None:
                raise ServiceFailure(refusal)
            upload = self._uploads[digest] = Upload(digest, size)
        elif upload.size != size:
            message = f"the upload {digest} was begun with {upload.size} bytes and goes on with {size}"
            raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message))
        upload.write(offset, data)
        if upload.complete:
            if upload.stored is None:
                upload.stored = asyncio.ensure_future(self._store(upload))
            await asyncio.shield(upload.stored)
        return upload.received

    async def run(
        self, request: TraceRequest, route: Route, foreign: Mapping[str, Saved], follower: str
    ) -> AsyncIterator[bytes]:
        """Run a trace, or follow a trace that was submitted before; yield serialized events.

        Args:
            request: the trace.
            route: where the trace runs.
            foreign: blobs of the tenant's other sessions that the trace uses, by id.
            follower: id of the call that reads the events. A trace without a follower is cancelled, unless it is a job.

        Raises:
            ServiceFailure: the trace as a whole failed, or could not be started.
        """
        async for event in self._follow(self._submitted(request, route, foreign), follower):
            yield event

    async def start(self, session_id: str, request: TraceRequest, route: Route, foreign: Mapping[str, Saved]) -> bytes:
        """Run a job, or find it if it was submitted before; return its first event.

        A job needs no follower.

        Raises:
            ServiceFailure: the job could not be started.
        """
        self._check(session_id)
        run = self._submitted(request, route, foreign)
        if run.announced is not None:
            await run.announced
        return request.accepted

    async def attach(self, session_id: str, trace_id: str, follower: str, seen: int = 0) -> AsyncIterator[bytes]:
        """Follow a trace that was submitted before; yield its serialized events after `seen` events.

        Raises:
            ServiceFailure: NOT_FOUND, or the trace as a whole failed.
        """
        async for event in self._follow(self._known(session_id, trace_id), follower, seen):
            yield event

    async def job(self, session_id: str, trace_id: str) -> service_pb2.JobStatus:
        """Return the state of a trace.

        Raises:
            ServiceFailure: NOT_FOUND, there is no such trace, or its values have expired and the trace with them.
        """
        return self._status(self._known(session_id, trace_id))

    async def describe(self, session_id: str) -> service_pb2.SessionDescription:
        """Return what the session holds."""
        self._check(session_id)
        return service_pb2.SessionDescription(
            session_id=session_id,
            traces=[self._status(run) for run in self._traces.values()],
            stored_bytes=self._stored(),
            max_stored_bytes=self._terms.stored_bytes,
            idle_seconds=self._terms.idle_seconds,
        )

    async def leave(self, session_id: str, trace_id: str, follower: str) -> None:
        """Note that the connection to a follower is gone.

        If no follower comes back soon, the trace is cancelled. A client that goes on purpose cancels its trace itself. A client
        whose connection broke comes back.
        """
        run = self._traces.get(trace_id)
        if session_id != self._id or run is None:
            return
        run.readers.followers.discard(follower)
        await asyncio.sleep(RECONNECT_SECONDS)
        if not run.readers.followers and run.running and not run.request.job:
            run.abandoned = True
            await run.cancel()

    async def cancel(self, session_id: str, trace_id: str, forget: bool = False) -> bool:
        """Cancel a trace; return whether it was running.

        Args:
            forget: also drop the values that the trace saved.
        """
        self._check(session_id)
        run = self._traces.get(trace_id)
        running = run is not None and run.running
        if run is not None:
            await run.cancel()
            if forget:
                self._forget(run)
        return running

    async def blob_ref(self, session_id: str, blob_id: str) -> list[ray.ObjectRef]:
        """Return a reference to a saved value, in a list so that it travels as a reference.

        Raises:
            ServiceFailure: NOT_FOUND, the value does not exist, or no longer exists.
        """
        self._check(session_id)
        run = self._by_key.get(blob_id.partition("/")[0])
        saved = await run.blob(blob_id) if run is not None else None
        return [(saved or self._saved(blob_id)).ref]

    async def fetched(self, session_id: str, blob_id: str) -> None:
        """Note that a saved value was sent to the client completely."""
        if session_id == self._id and (run := self._by_key.get(blob_id.partition("/")[0])) is not None:
            run.readers.fetched.add(blob_id)

    async def saved(self, session_id: str, blob_ids: list[str]) -> list[Saved]:
        """Return saved values for a trace of another session of the tenant.

        Raises:
            ServiceFailure: NOT_FOUND, a value does not exist, or no longer exists.
        """
        self._check(session_id)
        return [self._saved(blob_id) for blob_id in blob_ids]

    # The workers' side

    def has(self, key: str) -> bool:
        """Whether a trace's key is known here."""
        return key in self._by_key

    async def log(self, key: str, invoke: int, text: str) -> None:
        """Record a text that a block printed."""
        run = self._by_key.get(key)
        if run is not None:
            await run.log(invoke, text)

    async def adopt(self, key: str, blob_id: str, saved: Saved) -> None:
        """Take one saved value, which the directory owns."""
        run = self._by_key.get(key)
        if run is not None:
            await run.adopt(blob_id, saved)

    async def no_room(self, key: str) -> None:
        """Note that the object store has no room for a saved value."""
        run = self._by_key.get(key)
        if run is not None:
            await run.no_room()

    async def increment(self, key: str, data: bytes) -> None:
        """Take a serialized event with values that a block of a streamed trace saved."""
        run = self._by_key.get(key)
        if run is not None:
            await run.increment(data)

    async def blobs(self, key: str, ids: list[str]) -> list[ray.ObjectRef]:
        """Return references to uploads and saved values, uint8 of shape [bytes] each.

        Args:
            key: the trace that needs them. The trace gets only the saved values that its request names.
            ids: digests and blob ids.

        Raises:
            ServiceFailure: NOT_FOUND, a blob does not exist.
        """
        run = self._by_key.get(key)
        if run is None:
            raise not_found(f"there is no trace {key}")
        remotes = run.remotes
        refs = [remotes[name].ref if name in remotes else self._uploaded.get(name, (None, 0))[0] for name in ids]
        missing = [name for name, ref in zip(ids, refs, strict=True) if ref is None]
        if missing:
            raise not_found(f"not uploaded to this session: {', '.join(missing)}")
        return refs

    # Internal

    def _check(self, session_id: str) -> None:
        if not session_id or session_id != self._id:
            raise not_found("the session has ended; open a new one")
        self._touched = time.monotonic()

    def _known(self, session_id: str, trace_id: str) -> TraceRun:
        self._check(session_id)
        run = self._traces.get(trace_id)
        if run is None:
            raise self._gone(f"trace {trace_id}")
        return run

    def _gone(self, what: str) -> ServiceFailure:
        since = "after the session was last used" if self._kept else "after the trace has ended"
        return not_found(
            f"there is no {what} (any more): values are kept for {self._terms.retention_seconds:g} s {since}"
        )

    def _submitted(self, request: TraceRequest, route: Route, foreign: Mapping[str, Saved]) -> TraceRun:
        """Return the run of a trace; a new trace is started."""
        self._check(request.session_id)
        run = self._traces.get(request.trace_id)
        if run is not None and run.request.trace != request.trace:
            message = f"the trace id {request.trace_id} was used before, for another trace"
            raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message, trace_id=request.trace_id))
        return self._start(request, route, foreign) if run is None or run.repeatable else run

    async def _follow(self, run: TraceRun, follower: str, seen: int = 0) -> AsyncIterator[bytes]:
        run.readers.followers.add(follower)
        try:
            async for event in run.event_log.follow(seen):
                yield event
        finally:
            run.readers.read = run.readers.read or run.event_log.ended
            run.readers.followers.discard(follower)
            self._touched = time.monotonic()

    def _start(self, request: TraceRequest, route: Route, foreign: Mapping[str, Saved]) -> TraceRun:
        self._forget(self._traces.get(request.trace_id))
        refusal = self._no_room(len(request.trace), traces=1)
        if refusal is not None:
            raise ServiceFailure(refusal)
        remotes = {blob_id: self._saved(blob_id) for blob_id in request.remotes} | dict(foreign)
        before = [
            run
            for run in self._traces.values()
            if run.running and not run.request.variables.isdisjoint(request.variables)
        ]
        key = f"{uuid.uuid4().hex[:12]}.{request.trace_id}"
        request = dataclasses.replace(request, key=key, keep=request.keep or self._kept)
        run = TraceRun(request, self._no_room, self._keep, remotes, self._variables)
        self._traces[request.trace_id] = self._by_key[key] = run
        self._forgotten = self._forgotten or bool(foreign)
        try:
            run.start(functools.partial(self._engines.run, route), before)
        except BaseException:  # the trace has no room in the archive and must not count as running
            self._forget(run)
            raise
        self._done += 1
        return run

    def _saved(self, blob_id: str) -> Saved:
        """Return a saved value; a later trace than the value's own may have kept it."""
        run = self._by_key.get(blob_id.partition("/")[0])
        for blobs in (run.arrivals.blobs if run is not None else {}, self._shared_again()):
            if blob_id in blobs:
                return blobs[blob_id]
        raise self._gone(f"saved value {blob_id}")

    def _shared_again(self) -> dict[str, Saved]:
        """The saved values in variables, and values that later traces saved again, by blob id."""
        return self._variables.blobs | {
            name: saved for run in self._traces.values() for name, saved in run.again.items()
        }

    def _status(self, run: TraceRun) -> service_pb2.JobStatus:
        return run.progress.status(run.stored_bytes, self._expires_at(run))

    def _expires_at(self, run: TraceRun) -> float | None:
        """When a trace's values expire, on the monotonic clock; None while the trace runs."""
        if run.ended_at is None:
            return None
        return (max(run.ended_at, self._touched) if self._kept else run.ended_at) + self._terms.retention_seconds

    def _kept_for(self, run: TraceRun) -> bool:
        """Whether a client may come back for the values of a trace."""
        expires_at = self._expires_at(run)
        return run.request.keep and (expires_at is None or expires_at > time.monotonic())

    async def _store(self, upload: Upload) -> None:
        try:
            data = await asyncio.to_thread(upload.finish)
            self._uploaded[upload.digest] = (await asyncio.to_thread(put, data), upload.size)
        finally:
            self._uploads.pop(upload.digest, None)

    def _stored(self) -> int:
        held = sum(run.stored_bytes for run in self._traces.values()) + self._variables.size
        if self._forgotten:
            left = self._shared_again().items()
            held += sum(saved.size for name, saved in left if name.partition("/")[0] not in self._by_key)
        held += sum(size for _, size in self._uploaded.values())
        return held + sum(upload.size for upload in self._uploads.values())

    def _no_room(self, size: int, traces: int = 0) -> pb.Failure | None:
        """Make room for `size` more bytes and `traces` more traces.

        Values that no client comes back for are dropped, oldest first. Returns a refusal if that is not enough.
        """

        def full() -> bool:
            return len(self._traces) + traces > MAX_TRACES or self._stored() + size > self._terms.stored_bytes

        left_over = [run for run in self._traces.values() if not run.running and not self._kept_for(run)]
        left_over.sort(key=lambda run: run.ended_at or 0)
        while left_over and full():
            self._forget(left_over.pop(0))
        if not full():
            return None
        message = (
            f"the session holds {self._stored()} bytes of {len(self._traces)} traces and may hold {self._terms.stored_bytes} of "
            f"{MAX_TRACES}, which leaves no room for {size} more: save less, or close it and open another session"
        )
        if any(not run.running for run in self._traces.values()):
            message += (
                f"; results of jobs and of kept sessions go by themselves after {self._terms.retention_seconds:g} s"
            )
        now = time.monotonic()
        until = [expires_at - now for run in self._traces.values() if (expires_at := self._expires_at(run)) is not None]
        return failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=max(1.0, min(until, default=0.0)))

    def _forget(self, run: TraceRun | None) -> None:
        if run is not None:
            self._traces.pop(run.id, None)
            self._by_key.pop(run.key, None)
            self._forgotten = True
            self._directory.drop.remote(self._id, run.key)

    def _keep(self, trace: KeptTrace, variables: Mapping[str, Copy]) -> Awaitable[None]:
        return self._directory.keep.remote(trace.request.session_id, trace, variables)

    def sweep(self) -> None:
        """Drop values that have expired; called periodically."""
        now = time.monotonic()
        for run in list(self._traces.values()):
            expires_at = self._expires_at(run)
            if expires_at is not None and expires_at < now:
                self._forget(run)
        if self._variables.size and not self._traces and self._touched + self._terms.retention_seconds < now:
            self._variables.clear()
            self._directory.drop_variables.remote(self._id)
