"""The way out of a worker: saved bytes and printed text go to the trace's session.

A thread of its own does the sending, so that the forward pass goes on. The thread hands the bytes of one saved tensor at a time
to the directory, and waits until the directory owns the bytes and the session knows of them. So at most one tensor is in memory
twice. Only one rank reports.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy

from executor.core.errors import Refusal
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

# The same as in `actors.naming`, which the executor may not import.
NAMESPACE = "interpose"
DIRECTORY = "interpose-directory"
_MAX_LOG_BYTES = 1 << 20


class Outbox(Protocol):
    """Where a worker's blobs and logs go, and where uploaded blobs come from."""

    def log(self, session: str, trace_id: str, invoke: int, text: str) -> bool: ...

    def put(self, session: str, trace_id: str, blob_id: str, data: memoryview) -> None: ...

    def increment(self, session: str, trace_id: str, data: bytes) -> None: ...

    def get(self, session: str, trace_id: str, digest: str) -> Any: ...

    def forget(self, trace_id: str) -> None: ...

    def close(self) -> None: ...


class RayOutbox:
    """Sends to session actors and to the directory over Ray.

    Args:
        reports: whether this rank sends. The other ranks run the same code and drop what it would send.
    """

    def __init__(self, reports: bool) -> None:
        self._reports = reports
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._logged: dict[str, int] = {}
        self._actors: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def log(self, session: str, trace_id: str, invoke: int, text: str) -> bool:
        """Send printed text; return whether the trace may print more.

        After 1 MiB, a trace's text is cut off with a note, and the call returns False.
        """
        logged = self._logged.get(trace_id, 0)
        if not self._reports or logged > _MAX_LOG_BYTES:
            return False
        self._logged[trace_id] = logged + len(text)
        if logged + len(text) > _MAX_LOG_BYTES:
            text = text[: _MAX_LOG_BYTES - logged] + "\n[more than 1 MiB printed: the rest is left out]\n"
        self._submit(lambda: self._send_log(session, trace_id, invoke, text))
        return True

    def put(self, session: str, trace_id: str, blob_id: str, data: memoryview) -> None:
        """Send the bytes of one tensor; the caller must not change them any more."""
        if self._reports:
            array = numpy.frombuffer(data, dtype=numpy.uint8)
            self._submit(lambda: self._send_blob(session, trace_id, blob_id, array))

    def increment(self, session: str, trace_id: str, data: bytes) -> None:
        """Send a serialized event with an increment, after the blobs that it names."""
        if self._reports:
            self._submit(lambda: self._send_increment(session, trace_id, data))

    def get(self, session: str, trace_id: str, digest: str) -> Any:
        """Return the bytes of an uploaded or a saved blob, read-only.

        The call waits for the session actor, at most 30 seconds.

        Raises:
            Refusal: NOT_FOUND, the blob is not there; UNAVAILABLE, the session is not there.
        """
        import ray

        try:
            [ref] = ray.get(self._actor(session).blobs.remote(trace_id, [digest]), timeout=30)
            return ray.get(ref, timeout=30)
        except ray.exceptions.RayTaskError as error:
            known = getattr(error.cause, "failure", None)
            if known is None:
                raise
            raise Refusal(known.code, known.message) from None  # without the service's traceback
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ValueError):
            message = "what the trace refers to cannot be had from its session now: run it again"
            raise Refusal(pb.ERROR_CODE_UNAVAILABLE, message) from None

    def forget(self, trace_id: str) -> None:
        """Drop everything that is kept about an ended trace."""
        self._logged.pop(trace_id, None)

    def close(self) -> None:
        """Send what is left, and stop the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=10)
            self._thread = None

    def _submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="interpose-outbox", daemon=True)
            self._thread.start()
        self._queue.put(job)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception:
                # The session is gone. The trace's owner learns it from the session, and the worker goes on.
                logger.warning("a session did not take a saved value or a log line", exc_info=True)
            del job

    def _actor(self, name: str) -> Any:
        import ray

        if name not in self._actors:
            if len(self._actors) > 256:
                self._actors.clear()
            self._actors[name] = ray.get_actor(name, namespace=NAMESPACE)
        return self._actors[name]

    def _send_log(self, session: str, trace_id: str, invoke: int, text: str) -> None:
        self._actor(session).log.remote(trace_id, invoke, text)

    def _send_increment(self, session: str, trace_id: str, data: bytes) -> None:
        self._actor(session).increment.remote(trace_id, data)

    def _send_blob(self, session: str, trace_id: str, blob_id: str, array: numpy.ndarray) -> None:
        """Hand an array to the session's actor; array: uint8 [bytes]."""
        import ray

        for again in (True, False):
            try:
                actor = self._actor(session)
                ray.get(self._actor(DIRECTORY).adopt.remote(actor, trace_id, blob_id, array), timeout=300)
                return
            except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
                if not (again and self._makes_room()):
                    self._actor(session).no_room.remote(trace_id)
                    raise
            except ray.exceptions.RayActorError:
                # The directory is gone, and another directory has its name now.
                self._actors.pop(DIRECTORY, None)
                if not again:
                    raise

    def _makes_room(self) -> bool:
        """Ask the directory to make room on this node's disk; return whether it did."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        try:
            return bool(ray.get(self._actor(DIRECTORY).make_room.remote(node), timeout=60))
        except ray.exceptions.RayError:
            return False


class LocalOutbox:
    """Keeps everything in this process, for an engine that runs without Ray.

    Attributes:
        blobs: the saved bytes by blob id, read-only, in the memory where they were.
        logs: (trace id, invoke, text) in order.
        increments: (trace id, serialized event with an increment) in order.
        uploads: the bytes that traces refer to, by digest.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, memoryview] = {}
        self.logs: list[tuple[str, int, str]] = []
        self.increments: list[tuple[str, bytes]] = []
        self.uploads: dict[str, bytes] = {}

    def log(self, session: str, trace_id: str, invoke: int, text: str) -> bool:
        self.logs.append((trace_id, invoke, text))
        return True

    def put(self, session: str, trace_id: str, blob_id: str, data: memoryview) -> None:
        self.blobs[blob_id] = data.toreadonly()

    def increment(self, session: str, trace_id: str, data: bytes) -> None:
        self.increments.append((trace_id, data))

    def get(self, session: str, trace_id: str, digest: str) -> Any:
        return self.uploads[digest]

    def forget(self, trace_id: str) -> None:
        pass

    def close(self) -> None:
        pass
