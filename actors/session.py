"""A session: holds a client's uploads, traces and saved values until they expire.

A session actor (`actors.session_host`) holds many sessions. Workers' messages carry a trace's key; messages with an unknown
key are ignored. State that must outlive the actor lies with the directory too (`actors.archive`).

Size: all calls that reach a session: of clients, of workers, of the directory and of operators.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any

import ray

from actors.archive import Kept, KeptTrace
from actors.caller_watch import CallerWatch
from actors.dues import Dues
from actors.failures import not_found
from actors.plain_requests import PlainRequests
from actors.protocol import Route, SessionStats, Terms, Work
from actors.saved import Saved
from actors.session_store import SessionStore
from actors.telemetry.spans import Span
from actors.telemetry.telemetry import Telemetry
from actors.trace_rows import row_of
from actors.trace_run import EngineStream, TraceRun
from actors.variables import Copy
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import operator_pb2, service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest, new_key

if TYPE_CHECKING:
    from actors.engine_stream import EngineCalls

# Seconds that a trace runs on when its client is gone. Clients come back within four seconds.
RECONNECT_SECONDS = 5.0


class Session:
    """State of one session; every method runs on the session actor's event loop.

    Args:
        engines: calls the engines.
        directory: handle of the directory.
        terms: the terms until the session is opened.
        telemetry: is told of traces that have ended.
        watch: notices that an ingress is gone.
    """

    def __init__(
        self,
        engines: EngineCalls,
        directory: Any,
        terms: Terms,
        telemetry: Telemetry | None = None,
        watch: CallerWatch | None = None,
    ) -> None:
        self._telemetry = telemetry or Telemetry("session")
        self._directory = directory
        self._engines = engines
        self._plain = PlainRequests(watch or CallerWatch())
        self._clear("", False, terms)

    def _clear(self, session_id: str, kept: bool, terms: Terms) -> None:
        self._store = SessionStore(session_id, kept, terms, self._directory)
        self._dues = Dues(self._directory, self._store)
        self._left = False
        self._done = Work()

    # The directory's side

    async def open(self, session_id: str, kept: bool, terms: Terms) -> None:
        """Begin a lease; everything of an earlier lease is dropped.

        Args:
            kept: whether the client may go and come back for the values.
            terms: terms of this lease.
        """
        await self.close()
        self._clear(session_id, kept, terms)

    async def restore(self, session_id: str, kept: Kept, terms: Terms) -> None:
        """Go on with a lease whose actor is dead."""
        await self.open(session_id, kept.kept, terms)
        self._left = kept.left
        for trace in kept.traces.values():
            run = TraceRun.restored(trace, self._dues, self._keep, self._store.variables)
            self._store.add(run)
        self._store.variables.keep(kept.variables)
        self._store.forgotten = True
        self._done = sum((run.work for run in self._store.traces.values()), Work())
        self._dues.restored()

    async def leave_jobs(self) -> bool:
        """Note that the client goes and leaves only its jobs; return whether there are any.

        The session becomes idle for good when its last job has ended and the job's values have gone.
        """
        self._left = True
        for run in list(self._store.traces.values()):
            if not run.request.job:
                await run.cancel()
                self._store.forget(run)
        return bool(self._store.traces)

    async def close(self) -> SessionStats:
        """End the lease: cancel its traces and drop its values.

        Returns:
            What the session held and did.
        """
        await asyncio.gather(*(run.cancel() for run in self._store.traces.values()))
        # The end of the lease gives back all that its traces owe; what they have used must be known before.
        await self._dues.settled()
        stats = await self.stats()
        self._clear("", False, self._store.terms)
        return stats

    async def stats(self) -> SessionStats:
        """Return what the session holds and does."""
        running = sum(run.running for run in self._store.traces.values())
        idle = math.inf if self._left else time.monotonic() - self._store.touched
        return SessionStats(
            idle_seconds=0.0
            if any(run.running or self._store.kept_for(run) for run in self._store.traces.values())
            else idle,
            traces_running=running,
            done=self._done,
            stored_bytes=self._store.stored_bytes(),
            collected=self._left or self._store.collected,
            owing=self._dues.owing,
        )

    def heed(self, terms: Terms) -> None:
        """Set the rules for the session from now on."""
        self._store.terms = terms

    def turn(self, key: str) -> None:
        """Note that a trace may run, which waited for its tenant's quota."""
        self._dues.turn(key)

    # The client's side, through the ingress

    async def upload(self, session_id: str, digest: str, size: int, offset: int, data: bytes) -> int:
        """Store one chunk of a blob; an empty chunk asks how many bytes are here.

        Returns:
            Bytes held so far; `size` means that the blob is complete and its digest right.

        Raises:
            ServiceFailure: INVALID_ARGUMENT, QUOTA_EXCEEDED, or NOT_FOUND for a lease that has ended.
        """
        self._check(session_id)
        try:
            return await self._store.uploads.write(digest, size, offset, data, self._dues.room)
        except ServiceFailure:
            self._dues.shrunk()
            raise

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

    async def plain(self, session_id: str, request: TraceRequest) -> None:
        """Account for a request that the ingress itself runs on an engine; return when it has ended.

        Nothing of it stays here.

        Args:
            request: the request, under a key that its ingress chose. The ingress is its `session`.

        Raises:
            ServiceFailure: the request as a whole failed, or must not run.
        """
        self._check(session_id)
        with self._plain.request(request.key) as told:
            run = self._start(request, told.run, {})
            try:
                async for _ in self._follow(run, request.session):
                    pass
            finally:
                if run.running:  # this call was cancelled
                    asyncio.get_running_loop().create_task(run.cancel())
                self._store.forget(run)
                self._dues.shrunk()

    async def may_run(self, session_id: str, key: str) -> None:
        """Wait until a plain request may run, or has failed."""
        if (told := await self._plain.find(key)) is not None:
            await told.settled.wait()

    async def told(self, session_id: str, key: str, size: int, events: bytes, end: bytes | None) -> None:
        """Take what the engine has done of a plain request (see `PlainRequest.told`).

        Args:
            size: bytes of the answer since the last call.
        """
        told = await self._plain.find(key)
        run = self._store.by_key.get(key)
        if told is not None and run is not None:
            run.event_log.passed(size)
            told.told(events, end)

    async def start(self, session_id: str, request: TraceRequest, route: Route, foreign: Mapping[str, Saved]) -> bytes:
        """Run a job, or find it if it was submitted before; return its first event.

        A job needs no follower.

        Raises:
            ServiceFailure: the job could not be started.
        """
        self._check(session_id)
        run = self._submitted(request, route, foreign)
        await run.event_log.begun()
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
            traces=[self._status(run) for run in self._store.traces.values()],
            stored_bytes=self._store.stored_bytes(),
            max_stored_bytes=self._store.terms.stored_bytes,
            idle_seconds=self._store.terms.idle_seconds,
        )

    async def leave(self, session_id: str, trace_id: str, follower: str) -> None:
        """Note that the connection to a follower is gone.

        If no follower comes back soon, the trace is cancelled. A client that goes on purpose cancels its trace itself. A client
        whose connection broke comes back.
        """
        run = self._store.traces.get(trace_id)
        if session_id != self._store.session_id or run is None:
            return
        run.readers.followers.discard(follower)
        await asyncio.sleep(RECONNECT_SECONDS)
        if not run.readers.followers and run.running and not run.request.job:
            run.readers.abandoned = True
            await run.cancel()

    async def cancel(self, session_id: str, trace_id: str, forget: bool = False) -> bool:
        """Cancel a trace; return whether it was running.

        Args:
            forget: also drop the values that the trace saved.
        """
        self._check(session_id)
        run = self._store.traces.get(trace_id)
        running = run is not None and run.running
        if run is not None:
            await run.cancel()
            if forget:
                self._store.forget(run)
                self._dues.shrunk()
        return running

    async def blob_ref(self, session_id: str, blob_id: str) -> list[ray.ObjectRef]:
        """Return a reference to a saved value, in a list so that it travels as a reference.

        Raises:
            ServiceFailure: NOT_FOUND, the value does not exist, or no longer exists.
        """
        self._check(session_id)
        run = self._store.by_key.get(blob_id.partition("/")[0])
        saved = await run.blob(blob_id) if run is not None else None
        return [(saved or self._store.saved(blob_id)).ref]

    async def fetched(self, session_id: str, blob_id: str) -> None:
        """Note that a saved value was sent to the client completely."""
        if (
            session_id == self._store.session_id
            and (run := self._store.by_key.get(blob_id.partition("/")[0])) is not None
        ):
            run.readers.fetched.add(blob_id)

    async def saved(self, session_id: str, blob_ids: list[str]) -> list[Saved]:
        """Return saved values for a trace of another session of the tenant.

        Raises:
            ServiceFailure: NOT_FOUND, a value does not exist, or no longer exists.
        """
        self._check(session_id)
        return [self._store.saved(blob_id) for blob_id in blob_ids]

    # The operator's side

    def rows(self) -> list[operator_pb2.TraceRow]:
        """Return the traces that wait or run."""
        return [row_of(run, self._status(run)) for run in self._store.running()]

    async def cancel_key(self, key: str) -> bool:
        """Cancel a trace by its key; return whether it was running."""
        run = self._store.by_key.get(key)
        running = run is not None and run.running
        if run is not None and running:
            await run.cancel()
        return running

    # The workers' side

    def has(self, key: str) -> bool:
        """Whether a trace's key is known here."""
        return key in self._store.by_key

    async def log(self, key: str, invoke: int, text: str) -> None:
        """Record a text that a block printed."""
        run = self._store.by_key.get(key)
        if run is not None:
            await run.log(invoke, text)

    async def adopt(self, key: str, blob_id: str, saved: Saved) -> None:
        """Take one saved value, which the directory owns."""
        run = self._store.by_key.get(key)
        if run is not None:
            await run.adopt(blob_id, saved)

    async def no_room(self, key: str) -> None:
        """Note that the object store has no room for a saved value."""
        run = self._store.by_key.get(key)
        if run is not None:
            await run.no_room()

    async def increment(self, key: str, data: bytes) -> None:
        """Take a serialized event with values that a block of a streamed trace saved."""
        run = self._store.by_key.get(key)
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
        run = self._store.by_key.get(key)
        if run is None:
            raise not_found(f"there is no trace {key}")
        remotes = run.remotes
        refs = [remotes[name].ref if name in remotes else self._store.uploads.ref(name) for name in ids]
        missing = [name for name, ref in zip(ids, refs, strict=True) if ref is None]
        if missing:
            raise not_found(f"not uploaded to this session: {', '.join(missing)}")
        return refs

    def sweep(self) -> None:
        """Drop values that have expired; called periodically."""
        self._store.sweep()
        self._dues.shrunk()

    # Internal

    def _check(self, session_id: str) -> None:
        if not session_id or session_id != self._store.session_id:
            raise not_found("the session has ended; open a new one")
        self._store.touched = time.monotonic()

    def _known(self, session_id: str, trace_id: str) -> TraceRun:
        self._check(session_id)
        run = self._store.traces.get(trace_id)
        if run is None:
            raise self._store.gone(f"trace {trace_id}")
        return run

    def _submitted(self, request: TraceRequest, route: Route, foreign: Mapping[str, Saved]) -> TraceRun:
        """Return the run of a trace; a new trace is started."""
        self._check(request.session_id)
        run = self._store.traces.get(request.trace_id)
        if run is not None and run.request.trace != request.trace:
            message = f"the trace id {request.trace_id} was used before, for another trace"
            raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message, trace_id=request.trace_id))
        if run is not None and not run.repeatable:
            return run
        return self._start(request, functools.partial(self._engines.run, route), foreign)

    async def _follow(self, run: TraceRun, follower: str, seen: int = 0) -> AsyncIterator[bytes]:
        run.readers.followers.add(follower)
        try:
            async for event in run.event_log.follow(seen):
                yield event
        finally:
            # Without the follower among them, the client has left, and what came after that was read by nobody.
            there = follower in run.readers.followers
            run.readers.read = run.readers.read or (there and run.event_log.ended)
            run.readers.followers.discard(follower)
            self._store.touched = time.monotonic()

    def _start(self, request: TraceRequest, engine: EngineStream, foreign: Mapping[str, Saved]) -> TraceRun:
        self._store.forget(self._store.traces.get(request.trace_id))
        refusal = self._store.no_room(len(request.trace), traces=1)
        if refusal is not None:
            raise ServiceFailure(refusal)
        remotes = {blob_id: self._store.saved(blob_id) for blob_id in request.remotes} | dict(foreign)
        before = [
            run
            for run in (self._store.traces.values() if request.variables else ())
            if run.running and not run.request.variables.isdisjoint(request.variables)
        ]
        key = request.key or new_key(request.trace_id)
        span = self._telemetry.spans.begin(
            "session", request.traceparent, trace=request.trace_id, tenant=request.tenant
        )
        request = dataclasses.replace(request, key=key, keep=request.keep or self._store.kept, traceparent=span.context)
        run = TraceRun(request, self._dues, self._keep, remotes, self._store.variables)
        self._store.add(run)
        self._store.forgotten = self._store.forgotten or bool(foreign)
        try:
            run.start(engine, before, functools.partial(self._ended, span))
        except BaseException:  # the trace has no room in the archive and must not count as running
            self._store.forget(run)
            span.end("not started")
            raise
        return run

    def _ended(self, span: Span, run: TraceRun) -> None:
        """Count a trace that has ended; a trace that was refused leaves nothing."""
        record = run.progress.record(run.request, run.arrivals.saved_bytes)
        span.end(record.code, outcome=record.outcome, queued_seconds=record.queued)
        if run.refused:
            self._store.forget(run)
        else:
            self._done += run.work
            self._telemetry.trace_ended(record)

    def _status(self, run: TraceRun) -> service_pb2.JobStatus:
        return run.progress.status(run.stored_bytes, self._store.expires_at(run))

    def _keep(self, trace: KeptTrace, variables: Mapping[str, Copy]) -> Awaitable[None]:
        return self._directory.keep.remote(trace.request.session_id, trace, variables)
