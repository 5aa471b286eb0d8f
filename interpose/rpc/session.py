"""One session on the server: it keeps uploads and saved values for the traces of one client.

It is opened by the first trace and opened again when the server does not know it any more.
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
# How often in a row a session that has given way to others is opened anew for one trace.
_REOPENED = 8


class Session:
    """A session, used by one client; safe to use from several threads.

    Args:
        kept: whether its values stay when the client goes, for whoever knows its id.
        session_id: of one that is there already; "" for one that is opened when it is needed.

    Attributes:
        awaited: whether its client is one for asyncio: what a notebook calls is awaited then.
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
        """Its id on the server, "" while it is not open."""
        return self._id

    @property
    def kept(self) -> bool:
        """Whether its values stay when the client goes."""
        return self._kept

    def open(self) -> str:
        """Return the session's id, opening the session if there is none."""
        with self._lock:
            if not self._id:
                self._id = self._transport.unary("OpenSession", OpenSessionRequest(kept=self._kept)).session_id
            return self._id

    def close(self) -> None:
        """Close the session on the server if it can be reached; its values go with it, except those of jobs."""
        with self._lock:
            session_id, self._id = self._id, ""
        if session_id:
            # Somebody may come back for jobs.
            request = CloseSessionRequest(session_id=session_id, keep_jobs=True)
            try:
                self._transport.unary("CloseSession", request, _GOODBYE_SECONDS)
            except InterposeError:
                pass  # it ends by itself when it has been idle long enough

    def start(self, trace: Trace, blobs: Mapping[str, memoryview]) -> str:
        """Upload what a trace needs and have it run as a job, which goes on by itself; return the session's id."""
        running = self.begin(trace, blobs, job=True)
        running.leave()
        return running.session_id

    def attach(self, session_id: str, trace_id: str, seen: int = 0) -> Stream:
        """Return the stream of a trace's events but the first `seen`; whoever leaves it does not end a job."""
        request = AttachRequest(session_id=session_id, trace_id=trace_id, seen=seen)
        return self._transport.stream("Attach", request)

    def describe_job(self, session_id: str, trace_id: str) -> JobStatus:
        """Return how a trace is."""
        return self._transport.unary("DescribeJob", DescribeJobRequest(session_id=session_id, trace_id=trace_id))

    def describe(self) -> SessionDescription:
        """Return what the session holds on the server."""
        return self._transport.unary("DescribeSession", DescribeSessionRequest(session_id=self.open()))

    def submit(self, trace: Trace, blobs: Mapping[str, memoryview]) -> Generator[tuple[str, Event], None, None]:
        """Upload what the trace needs, run it, and yield its events, each with the id of the session they belong to.

        Closing the iterator, or an exception thrown into it, cancels the trace on the server.
        """
        with closing(self.begin(trace, blobs)) as running:
            while (event := running.next()) is not None:
                yield running.session_id, event

    def begin(self, trace: Trace, blobs: Mapping[str, memoryview], *, job: bool = False) -> Running:
        """Upload what the trace needs and have it accepted; who gets it must close it.

        A server that is away for a moment is tried again, and a session that is gone is opened anew, as long as the trace
        has not been accepted. The server knows the trace by its id: one that it has is followed, not run a second time. When the
        connection breaks later, the events go on where they were (`interpose.rpc.reconnect`).

        Args:
            job: the trace goes on without its client; the one event is that it was accepted.
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
                # What is in a kept session is part of what the trace means; another one would not have it.
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
        """Return the bytes of what a view leaves of a saved value, uint8 [blob.size]; nothing else is sent."""
        with self._progress.bytes("fetching", blob.size) as bar:
            return fetch_one(self._transport, session_id, blob, bar, view=view)

    def cancel(self, session_id: str, trace_id: str, *, forget: bool = False) -> bool:
        """Cancel a trace, and have the server drop what it saved if `forget`; return whether it was running."""
        request = CancelRequest(session_id=session_id, trace_id=trace_id, forget=forget)
        return self._transport.unary("Cancel", request, _GOODBYE_SECONDS).found

    def _is_there(self, session_id: str) -> bool:
        """Whether the server knows a session: what it did not find may be something else."""
        try:
            self._transport.unary("DescribeSession", DescribeSessionRequest(session_id=session_id))
        except NotFound:
            return False
        return True

    def _leave(self, session_id: str, trace_id: str, wait: bool) -> None:
        """Cancel a trace whose events nobody reads any more, if the server can be reached."""
        try:
            request = CancelRequest(session_id=session_id, trace_id=trace_id)
            # Nobody waits for the other one, so it may take its time.
            sent = self._transport.begin("Cancel", request, _GOODBYE_SECONDS if wait else None)
            if wait:
                sent.result()
        except InterposeError:
            pass  # the server cancels it when it sees the broken stream

    def _accepted(self, session_id: str, trace: Trace, job: bool) -> Running:
        request = SubmitRequest(protocol=PROTOCOL, session_id=session_id, trace=trace, job=job)
        submit = self._transport.stream("Submit", request)
        # That of a job ends when it is accepted.
        stream = submit if job else Resuming(submit, lambda seen: self.attach(session_id, trace.id, seen))
        running = Running(session_id, trace.id, stream, lambda wait: self._leave(session_id, trace.id, wait))
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
