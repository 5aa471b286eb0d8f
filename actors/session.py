"""The session actor: owns a client's uploads, traces and saved values until the session ends or they are too old.

It is lent to one client at a time under a session id and runs nothing of a client's own, so it can be emptied and lent
again. Workers reach it by its name; everything they send is filed under a trace's key, and a key that is not known
(any more) is ignored.
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import ray

from actors.engine_stream import EngineCalls
from actors.failures import not_found
from actors.protocol import Order, SessionStats, Target
from actors.trace_run import TraceRun
from actors.upload import Upload
from interpose.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb

SWEEP_SECONDS = 10.0


class Session:
    """State of one session; every method runs on the actor's event loop.

    Args:
        name: the actor's name.
        directory: handle of the directory.
        retention_seconds: a finished trace's values are kept this long.
        stored_bytes: beyond this, the values of the oldest finished traces go first, then uploads are refused.
    """

    def __init__(self, name: str, directory: Any, retention_seconds: float, stored_bytes: int) -> None:
        self._retention = retention_seconds
        self._capacity = stored_bytes
        self._engines = EngineCalls(name, directory)
        self._sweeper: asyncio.Task[None] | None = None
        self._clear("")

    def _clear(self, session_id: str) -> None:
        self._id = session_id
        self._traces: dict[str, TraceRun] = {}
        self._by_key: dict[str, TraceRun] = {}
        self._uploads: dict[str, Upload] = {}
        self._uploaded: dict[str, tuple[ray.ObjectRef, int]] = {}
        self._done = 0
        self._touched = time.monotonic()

    # The directory's side

    async def prepare(self, targets: list[Target]) -> None:
        """Get ready to be lent: a handle to each engine."""
        for target in targets:
            self._engines.warm(target)
        self._sweeper = self._sweeper or asyncio.create_task(self._sweep())

    async def open(self, session_id: str) -> None:
        """Begin a lease; what an earlier one left is dropped."""
        await self.close()
        self._clear(session_id)

    async def close(self) -> SessionStats:
        """End the lease: cancel its traces, drop its values. Returns what it came to."""
        await asyncio.gather(*(run.cancel() for run in self._traces.values()))
        stats = await self.stats()
        self._clear("")
        return stats

    async def stats(self) -> SessionStats:
        """Return what the session holds and does."""
        running = sum(run.running for run in self._traces.values())
        return SessionStats(
            idle_seconds=0.0 if running else time.monotonic() - self._touched,
            traces_running=running,
            traces_done=self._done,
            stored_bytes=self._stored(),
        )

    # The client's side, through the ingress

    async def upload(self, session_id: str, digest: str, size: int, offset: int, data: bytes) -> int:
        """Store one chunk of a blob; an empty one asks how much is here.

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
            self._make_room(size)
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

    async def run(self, order: Order) -> AsyncIterator[bytes]:
        """Run a trace, or follow it if it has been submitted before; yields serialized events.

        Raises:
            ServiceFailure: the trace as a whole failed, or could not be started.
        """
        self._check(order.session_id)
        run = self._traces.get(order.trace_id)
        if run is not None and run.order.trace != order.trace:
            message = f"the trace id {order.trace_id} was used before, for another trace"
            raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message, trace_id=order.trace_id))
        if run is None or run.repeatable:
            run = self._start(order)
        run.followers.add(order.follower)
        try:
            async for event in run.recording.follow():
                yield event
        finally:
            run.followers.discard(order.follower)
            self._touched = time.monotonic()

    async def leave(self, session_id: str, trace_id: str, follower: str) -> None:
        """A follower's client is gone; if nobody else follows the trace, it is cancelled."""
        run = self._traces.get(trace_id)
        if session_id != self._id or run is None:
            return
        run.followers.discard(follower)
        if not run.followers and run.running:
            run.abandoned = True
            await run.cancel()

    async def cancel(self, session_id: str, trace_id: str) -> bool:
        """Cancel a trace; returns whether it was running."""
        self._check(session_id)
        run = self._traces.get(trace_id)
        if run is None or not run.running:
            return False
        await run.cancel()
        return True

    async def blob_ref(self, session_id: str, blob_id: str) -> list[ray.ObjectRef]:
        """Return a reference to a saved value, in a list so that it travels as a reference.

        Raises:
            ServiceFailure: NOT_FOUND, there is none, or not any more.
        """
        self._check(session_id)
        for run in self._traces.values():
            if blob_id.startswith(run.key + "/"):
                ref = await run.blob(blob_id)
                if ref is not None:
                    return [ref]
        raise not_found(f"there is no saved value {blob_id}, or it was kept longer than {self._retention:g} s ago")

    # The workers' side

    async def log(self, key: str, invoke: int, text: str) -> None:
        """Something a block printed."""
        run = self._by_key.get(key)
        if run is not None:
            await run.log(invoke, text)

    async def adopt(self, key: str, blob_id: str, data: np.ndarray) -> None:
        """Take over one saved value, uint8 of shape [bytes]."""
        run = self._by_key.get(key)
        if run is not None:
            await run.adopt(blob_id, data)

    async def increment(self, key: str, data: bytes) -> None:
        """Something that a block of a streamed trace saved, a serialized `Increment`."""
        run = self._by_key.get(key)
        if run is not None:
            await run.increment(pb.Increment.FromString(data))

    async def blobs(self, key: str, digests: list[str]) -> list[np.ndarray]:
        """Return uploaded blobs, uint8 of shape [bytes] each.

        Raises:
            ServiceFailure: NOT_FOUND, one of them was never uploaded to this session.
        """
        missing = [digest for digest in digests if digest not in self._uploaded]
        if key not in self._by_key or missing:
            raise not_found(f"not uploaded to this session: {', '.join(missing) or key}")
        return [await self._uploaded[digest][0] for digest in digests]

    # Its own

    def _check(self, session_id: str) -> None:
        if not session_id or session_id != self._id:
            raise not_found("the session has ended; open a new one")
        self._touched = time.monotonic()

    def _start(self, order: Order) -> TraceRun:
        self._forget(self._traces.get(order.trace_id))
        self._make_room(0)
        key = f"{uuid.uuid4().hex[:12]}.{order.trace_id}"
        run = self._traces[order.trace_id] = self._by_key[key] = TraceRun(order, key)
        run.start(functools.partial(self._engines.run, order.target))
        self._done += 1
        return run

    async def _store(self, upload: Upload) -> None:
        try:
            data = await asyncio.to_thread(upload.finish)
            self._uploaded[upload.digest] = (await asyncio.to_thread(ray.put, data), upload.size)
        finally:
            self._uploads.pop(upload.digest, None)

    def _stored(self) -> int:
        held = sum(run.stored_bytes for run in self._traces.values())
        held += sum(size for _, size in self._uploaded.values())
        return held + sum(upload.size for upload in self._uploads.values())

    def _make_room(self, size: int) -> None:
        finished = sorted((run for run in self._traces.values() if not run.running), key=lambda run: run.ended_at or 0)
        while finished and self._stored() + size > self._capacity:
            self._forget(finished.pop(0))
        if self._stored() + size > self._capacity:
            message = (
                f"the session holds {self._stored()} bytes and may hold {self._capacity}: save less, or close it and "
                "open another one"
            )
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message))

    def _forget(self, run: TraceRun | None) -> None:
        if run is not None:
            self._traces.pop(run.id, None)
            self._by_key.pop(run.key, None)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._retention / 2))
            oldest = time.monotonic() - self._retention
            for run in list(self._traces.values()):
                if run.ended_at is not None and run.ended_at < oldest:
                    self._forget(run)
