"""The client's side of a session, which keeps uploads and saved values on the server.

The first trace opens the session. The client opens a new session when the server has dropped the session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import NoReturn

import numpy as np

from interpose.contract.errors import InterposeError, InvalidArgument, NotFound, Unavailable
from interpose.contract.version import PROTOCOL
from interpose.rpc.call import Running
from interpose.rpc.channel import Stream, Transport
from interpose.rpc.progress import Progress
from interpose.rpc.reconnect import Resuming
from interpose.rpc.spans import ClientSpan
from interpose.rpc.transfer import BACKOFF_SECONDS, fetch, fetch_one, upload
from interpose.v1.service_pb2 import (
    AttachRequest,
    CancelRequest,
    CloseSessionRequest,
    DescribeJobRequest,
    DescribeSessionRequest,
    JobStatus,
    Limits,
    OpenSessionRequest,
    SessionDescription,
    SubmitRequest,
)
from interpose.v1.trace_pb2 import Event, Trace
from interpose.v1.value_pb2 import Blob, TensorView

_GOODBYE_SECONDS = 5.0
# The server may drop a session to make room. The client opens a new session so many times for one trace.
_REOPENED = 8


class Session:
    """A session of one client; safe to use from several threads.

    Args:
        kept: whether the values stay when the client goes, for another client with the session's id.
        session_id: the id of an open session; "": the session is opened when it is needed.

    Attributes:
        awaited: whether the client is a client for asyncio, whose methods are awaited.
    """

    def __init__(
        self, transport: Transport, limits: Limits, progress: Progress, *, kept: bool = False, session_id: str = ""
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._progress = progress
        self._kept = kept
        self._lock = threading.Lock()
        self._id = session_id
        self._empty = not session_id
        self.awaited = False

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse `model.session()`, which is how nnsight opens a session."""
        raise InvalidArgument("the client opens sessions: write `with client.session() as s:` around the traces")

    @property
    def id(self) -> str:
        """The session's id on the server, "" while the session is not open."""
        return self._id

    @property
    def kept(self) -> bool:
        """Whether the session's values stay when the client goes."""
        return self._kept

    def open(self) -> str:
        """Return the session's id; the first call opens the session."""
        with self._lock:
            if not self._id:
                self._id = self._transport.unary("OpenSession", OpenSessionRequest(kept=self._kept)).session_id
            return self._id

    def close(self) -> None:
        """Close the session on the server, if the server can be reached.

        The server drops the session's values, and keeps its jobs.
        """
        with self._lock:
            session_id, self._id = self._id, ""
        if session_id:
            # A client may fetch the results of jobs later.
            request = CloseSessionRequest(session_id=session_id, keep_jobs=True)
            try:
                self._transport.unary("CloseSession", request, _GOODBYE_SECONDS)
            except InterposeError:
                pass  # the server closes an idle session after some time

    def start(self, trace: Trace, blobs: Mapping[str, memoryview]) -> str:
        """Upload the trace's large values and start the trace as a job; return the session's id."""
        running = self.begin(trace, blobs, job=True)
        running.leave()
        return running.session_id

    def attach(self, session_id: str, trace_id: str, seen: int = 0) -> Stream:
        """Return the stream of a trace's events after the first `seen` events.

        A job goes on when the stream is cancelled.
        """
        request = AttachRequest(session_id=session_id, trace_id=trace_id, seen=seen, bundles=True)
        return self._transport.stream("Attach", request)

    def describe_job(self, session_id: str, trace_id: str) -> JobStatus:
        """Return the state of a job."""
        return self._transport.unary("DescribeJob", DescribeJobRequest(session_id=session_id, trace_id=trace_id))

    def describe(self) -> SessionDescription:
        """Return the server's description of the session: its traces and its bytes."""
        return self._transport.unary("DescribeSession", DescribeSessionRequest(session_id=self.open()))

    def submit(self, trace: Trace, blobs: Mapping[str, memoryview]) -> Generator[tuple[str, Event], None, None]:
        """Upload the trace's large values, run the trace, and yield its events.

        Closing the iterator, or an exception thrown into it, cancels the trace on the server.

        Yields:
            The session's id and an event.
        """
        with closing(self.begin(trace, blobs)) as running:
            while (event := running.next()) is not None:
                yield running.session_id, event

    def begin(self, trace: Trace, blobs: Mapping[str, memoryview], *, job: bool = False) -> Running:
        """Upload the trace's large values and wait until the server accepts the trace.

        The caller must close the returned object. Until the trace is accepted, the client tries again when the server cannot
        be reached, and opens a new session when the server has dropped the session. The server knows the trace by its id, and
        does not run the same trace twice. When the connection breaks later, a new connection goes on after the last event
        (`interpose.rpc.reconnect`).

        Args:
            trace: the trace.
            blobs: the bytes of large values, by digest ("sha256:…").
            job: whether the trace goes on without its client. The only event is then that the server accepted the trace.
        """
        reopened = 0
        attempt = 0
        while True:
            session_id = ""
            try:
                session_id = self.open()
                upload(self._transport, session_id, blobs, self._limits.chunk_bytes, self._progress)
                running = self._accepted(session_id, trace, job)
                self._empty = False
                return running
            except NotFound:
                # The trace may use values of a kept session. A new session would not have these values.
                lasting = self._kept and not self._empty
                if reopened >= _REOPENED or not session_id or lasting or self._is_there(session_id):
                    raise
                reopened += 1
                self._forget(session_id)
            except Unavailable:
                if attempt >= len(BACKOFF_SECONDS):
                    raise
                time.sleep(BACKOFF_SECONDS[attempt])
                attempt += 1

    def fetch(self, session_id: str, blobs: Sequence[Blob]) -> dict[str, np.ndarray]:
        """Return the bytes of saved values by blob id, uint8 [size] each."""
        return fetch(self._transport, session_id, blobs, self._progress)

    def fetch_view(self, session_id: str, blob: Blob, view: TensorView) -> np.ndarray:
        """Return the bytes of a view of a saved value, uint8 [blob.size]; only they are sent."""
        with self._progress.bytes("fetching", blob.size) as bar:
            return fetch_one(self._transport, session_id, blob, bar, view=view)

    def cancel(self, session_id: str, trace_id: str, *, forget: bool = False) -> bool:
        """Cancel a trace; return whether the trace was running.

        Args:
            session_id: the session of the trace.
            trace_id: the trace.
            forget: whether the server drops the trace's results.
        """
        request = CancelRequest(session_id=session_id, trace_id=trace_id, forget=forget)
        return self._transport.unary("Cancel", request, _GOODBYE_SECONDS).found

    def _is_there(self, session_id: str) -> bool:
        """Whether the server knows a session; a NotFound may be about another object."""
        try:
            self._transport.unary("DescribeSession", DescribeSessionRequest(session_id=session_id))
        except NotFound:
            return False
        return True

    def _leave(self, session_id: str, trace_id: str, wait: bool) -> None:
        """Cancel a trace whose events are no longer read, if the server can be reached."""
        try:
            request = CancelRequest(session_id=session_id, trace_id=trace_id)
            # A call without a waiting caller has the default time limit, which is longer.
            sent = self._transport.begin("Cancel", request, _GOODBYE_SECONDS if wait else None)
            if wait:
                sent.result()
        except InterposeError:
            pass  # the server cancels it when it sees the broken stream

    def _accepted(self, session_id: str, trace: Trace, job: bool) -> Running:
        request = SubmitRequest(protocol=PROTOCOL, session_id=session_id, trace=trace, job=job, bundles=True)
        span = ClientSpan(trace.id, trace.model)
        submit = self._transport.stream("Submit", request, span.metadata)
        # The stream of a job ends when the job is accepted.
        stream = submit if job else Resuming(submit, lambda seen: self.attach(session_id, trace.id, seen))
        running = Running(session_id, trace.id, stream, lambda wait: self._leave(session_id, trace.id, wait), span)
        try:
            running.accepted()
        except BaseException:  # an interrupt too
            running.close()
            raise
        return running

    def _forget(self, session_id: str) -> None:
        with self._lock:
            if self._id == session_id:
                self._id = ""
