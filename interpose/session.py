"""One session on the server: it keeps uploads and saved values for the traces of one client.

It is opened by the first trace and opened again when the server does not know it any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing

import numpy as np

from interpose.errors import InterposeError, NotFound, Unavailable
from interpose.progress import Progress
from interpose.running import Running
from interpose.transfer import BACKOFF_SECONDS, fetch, upload
from interpose.transport import Transport
from interpose.v1.service_pb2 import (
    CancelRequest,
    CloseSessionRequest,
    Limits,
    OpenSessionRequest,
    SubmitRequest,
)
from interpose.v1.trace_pb2 import Event, Trace
from interpose.v1.value_pb2 import Blob
from interpose.version import PROTOCOL

_GOODBYE_SECONDS = 5.0


class Session:
    """A session, used by one client; safe to use from several threads."""

    def __init__(self, transport: Transport, limits: Limits, progress: Progress) -> None:
        self._transport = transport
        self._limits = limits
        self._progress = progress
        self._lock = threading.Lock()
        self._id = ""

    def open(self) -> str:
        """Return the session's id, opening the session if there is none."""
        with self._lock:
            if not self._id:
                self._id = self._transport.unary("OpenSession", OpenSessionRequest()).session_id
            return self._id

    def close(self) -> None:
        """Close the session on the server if it can be reached; saved values that were not fetched go with it."""
        with self._lock:
            session_id, self._id = self._id, ""
        if session_id:
            try:
                self._transport.unary("CloseSession", CloseSessionRequest(session_id=session_id), _GOODBYE_SECONDS)
            except InterposeError:
                pass  # it ends by itself when it has been idle long enough

    def submit(self, trace: Trace, blobs: Mapping[str, memoryview]) -> Generator[tuple[str, Event], None, None]:
        """Upload what the trace needs, run it, and yield its events, each with the id of the session they belong to.

        Closing the iterator, or an exception thrown into it, cancels the trace on the server.
        """
        with closing(self.begin(trace, blobs)) as running:
            while (event := running.next()) is not None:
                yield running.session_id, event

    def begin(self, trace: Trace, blobs: Mapping[str, memoryview]) -> Running:
        """Upload what the trace needs and have it accepted; who gets it must close it.

        A server that is away for a moment is tried again, and a session that is gone is opened anew, as long as the trace
        has not been accepted.
        """
        reopened = False
        attempt = 0
        while True:
            session_id = ""
            try:
                session_id = self.open()
                upload(self._transport, session_id, blobs, self._limits.chunk_bytes, self._progress)
                return self._accepted(session_id, trace)
            except NotFound:
                if reopened or not session_id:
                    raise
                reopened = True
                self._forget(session_id)
            except Unavailable:
                if attempt >= len(BACKOFF_SECONDS):
                    raise
                time.sleep(BACKOFF_SECONDS[attempt])
                attempt += 1

    def fetch(self, session_id: str, blobs: Sequence[Blob]) -> dict[str, np.ndarray]:
        """Return the bytes of saved values by blob id, uint8 [size] each."""
        return fetch(self._transport, session_id, blobs, self._progress)

    def cancel(self, session_id: str, trace_id: str, wait: bool = True) -> None:
        """Cancel a trace on the server if it can be reached."""
        try:
            request = CancelRequest(session_id=session_id, trace_id=trace_id)
            sent = self._transport.begin("Cancel", request, _GOODBYE_SECONDS)
            if wait:
                sent.result()
        except InterposeError:
            pass  # the server cancels it when it sees the broken stream

    def _accepted(self, session_id: str, trace: Trace) -> Running:
        request = SubmitRequest(protocol=PROTOCOL, session_id=session_id, trace=trace)
        stream = self._transport.stream("Submit", request)
        running = Running(session_id, trace.id, stream, lambda wait: self.cancel(session_id, trace.id, wait))
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
