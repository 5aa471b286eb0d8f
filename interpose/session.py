"""One session on the server: it keeps uploads and saved values for the traces of one client.

It is opened by the first trace and opened again when the server does not know it any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from interpose.errors import InterposeError, NotFound, Unavailable
from interpose.progress import Progress
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

        A server that is away for a moment is tried again, and a session that is gone is opened anew, as long as the trace
        has not been accepted. Closing the iterator, or an exception thrown into it, cancels the trace on the server.
        """
        reopened = False
        attempt = 0
        while True:
            session_id = ""
            accepted = False
            try:
                session_id = self.open()
                upload(self._transport, session_id, blobs, self._limits.chunk_bytes, self._progress)
                for event in self._events(session_id, trace):
                    accepted = True
                    yield session_id, event
                return
            except NotFound:
                if accepted or reopened or not session_id:
                    raise
                reopened = True
                self._forget(session_id)
            except Unavailable:
                if accepted or attempt >= len(BACKOFF_SECONDS):
                    raise
                time.sleep(BACKOFF_SECONDS[attempt])
                attempt += 1

    def fetch(self, session_id: str, blobs: Sequence[Blob]) -> dict[str, np.ndarray]:
        """Return the bytes of saved values by blob id, uint8 [size] each."""
        return fetch(self._transport, session_id, blobs, self._progress)

    def cancel(self, session_id: str, trace_id: str) -> None:
        """Cancel a trace on the server if it can be reached."""
        try:
            self._transport.unary("Cancel", CancelRequest(session_id=session_id, trace_id=trace_id), _GOODBYE_SECONDS)
        except InterposeError:
            pass  # the server cancels it when it sees the broken stream

    def _events(self, session_id: str, trace: Trace) -> Generator[Event, None, None]:
        request = SubmitRequest(protocol=PROTOCOL, session_id=session_id, trace=trace)
        stream = self._transport.stream("Submit", request)
        ended = False
        try:
            for event in stream.events():
                ended = event.WhichOneof("kind") == "done"
                yield event
            if not ended:
                raise Unavailable("the server ended the trace without finishing it", trace_id=trace.id)
        except InterposeError as error:
            ended = True
            error.trace_id = error.trace_id or trace.id
            raise
        finally:
            if not ended:  # interrupted from this side
                stream.cancel()
                self.cancel(session_id, trace.id)

    def _forget(self, session_id: str) -> None:
        with self._lock:
            if self._id == session_id:
                self._id = ""
