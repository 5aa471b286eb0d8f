"""Transfers of large values in chunks: uploads before a trace, and fetches after it.

After a break of the connection, a transfer goes on where it was.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from interpose.contract.errors import Cancelled, EngineError, InterposeError, Unavailable
from interpose.rpc.channel import Transport
from interpose.rpc.progress import Bar, Progress
from interpose.v1.service_pb2 import FetchRequest, UploadRequest
from interpose.v1.value_pb2 import Blob, TensorView

ATTEMPTS = 5
BACKOFF_SECONDS = (0.2, 0.5, 1.0, 2.0)
_IN_FLIGHT = 4  # the most upload chunks in flight, and the most blobs that are fetched at the same time
_DEFAULT_CHUNK = 1 << 20
# The most bytes of one Fetch, so that a broken call loses little.
WINDOW_BYTES = 32 << 20


def upload(
    transport: Transport, session_id: str, blobs: Mapping[str, memoryview], chunk_bytes: int, progress: Progress
) -> None:
    """Send the blobs that the session does not hold yet.

    Args:
        transport: the channel to the server.
        session_id: the session that gets the blobs.
        blobs: bytes by digest ("sha256:…").
        chunk_bytes: bytes of data in one message; 0: the default.
        progress: draws the progress bar.
    """
    if not blobs:
        return
    with progress.bytes("uploading", sum(data.nbytes for data in blobs.values())) as bar:
        for digest, data in blobs.items():
            _upload_one(transport, session_id, digest, data, chunk_bytes or _DEFAULT_CHUNK, bar)


def _upload_one(transport: Transport, session_id: str, digest: str, data: memoryview, chunk: int, bar: Bar) -> None:
    size = data.nbytes
    offsets = range(0, size, chunk)
    done: set[int] = set()
    for attempt in range(ATTEMPTS):
        try:
            ask = UploadRequest(session_id=session_id, digest=digest, size=size)
            if transport.unary("Upload", ask).received >= size:
                bar.update(sum(min(chunk, size - offset) for offset in offsets if offset not in done))
                return
            received = _send_chunks(transport, session_id, digest, data, chunk, done, bar)
            if received >= size:
                return
            done.clear()  # the server has lost a chunk, so all chunks are sent again
        except Unavailable:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(BACKOFF_SECONDS[attempt])
    raise EngineError(f"the server does not keep the uploaded value {digest}")


def _send_chunks(
    transport: Transport, session_id: str, digest: str, data: memoryview, chunk: int, done: set[int], bar: Bar
) -> int:
    """Send the chunks that are not done; return the number of bytes that the server holds."""
    size = data.nbytes
    received = 0
    waiting: deque[tuple[int, Future[Any]]] = deque()

    def settle() -> None:
        nonlocal received
        offset, future = waiting.popleft()
        received = max(received, future.result().received)
        done.add(offset)
        bar.update(min(chunk, size - offset))

    try:
        for offset in range(0, size, chunk):
            if offset in done:
                continue
            piece = UploadRequest(session_id=session_id, digest=digest, size=size, offset=offset)
            piece.data = bytes(data[offset : offset + chunk])
            waiting.append((offset, transport.begin("Upload", piece)))
            if len(waiting) >= _IN_FLIGHT:
                settle()
        while waiting:
            settle()
    finally:
        for _, future in waiting:
            future.cancel()
    return received


def fetch(transport: Transport, session_id: str, blobs: Sequence[Blob], progress: Progress) -> dict[str, np.ndarray]:
    """Return the bytes of several blobs by id, each a uint8 array [size] of its own.

    Raises:
        NotFound: the server has dropped a blob.
        Unavailable: the connection broke and did not come back.
    """
    wanted = {blob.id: blob for blob in blobs}
    if not wanted:
        return {}
    with progress.bytes("fetching", sum(blob.size for blob in wanted.values())) as bar:
        stop = threading.Event()
        with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="interpose-fetch") as pool:
            futures = {
                blob.id: pool.submit(fetch_one, transport, session_id, blob, bar, stop) for blob in wanted.values()
            }
            try:
                return {blob_id: future.result() for blob_id, future in futures.items()}
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def fetch_one(
    transport: Transport,
    session_id: str,
    blob: Blob,
    bar: Bar,
    stop: threading.Event | None = None,
    view: TensorView | None = None,
) -> np.ndarray:
    """Return the bytes of a blob, or of a view of it, as uint8 [size].

    Raises:
        Cancelled: `stop` is set.
        EngineError: the server sent other bytes than announced.
        NotFound: the server has dropped the blob.
        Unavailable: the connection broke and did not come back.
    """
    buffer = np.empty(blob.size, dtype=np.uint8)
    position = 0
    attempt = 0
    while position < blob.size:
        before = position
        window = min(blob.size - position, WINDOW_BYTES)
        request = FetchRequest(session_id=session_id, blob_id=blob.id, offset=position, length=window, view=view)
        stream = transport.stream("Fetch", request)
        try:
            for chunk in stream:
                if stop is not None and stop.is_set():
                    raise Cancelled("the transfer was given up")
                end = position + len(chunk.data)
                if chunk.offset != position or end > before + window:
                    raise _mismatch(blob, f"a chunk at {chunk.offset} came where {position} was next")
                buffer[position:end] = np.frombuffer(chunk.data, dtype=np.uint8)
                position = end
                bar.update(len(chunk.data))
            if position - before < window:
                raise _mismatch(blob, f"only {position - before} bytes came where {window} were asked for")
        except Unavailable:
            # The attempts count from the last progress, so a transfer survives any number of breaks with progress between.
            attempt = 0 if position > before else attempt + 1
            if attempt >= ATTEMPTS - 1:
                raise
            time.sleep(BACKOFF_SECONDS[attempt])
        finally:
            stream.cancel()
    return buffer


def _mismatch(blob: Blob, what: str) -> InterposeError:
    return EngineError(f"the saved value {blob.id} of {blob.size} bytes did not arrive as announced: {what}")
