"""The uploads of one session, complete and begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import ray

from actors.spilled import put
from actors.upload import Upload
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb


class Uploads:
    """Blobs that a client has uploaded to one session."""

    def __init__(self) -> None:
        self._begun: dict[str, Upload] = {}
        self._complete: dict[str, tuple[ray.ObjectRef, int]] = {}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all uploads; an upload that has begun counts with its full size."""
        return sum(size for _, size in self._complete.values()) + sum(upload.size for upload in self._begun.values())

    def ref(self, digest: str) -> ray.ObjectRef | None:
        """Return a reference to a complete upload, uint8 of shape [bytes]; None if there is none."""
        return self._complete.get(digest, (None, 0))[0]

    async def write(
        self,
        digest: str,
        size: int,
        offset: int,
        data: bytes,
        room: Callable[[int], AbstractAsyncContextManager[None]],
    ) -> int:
        """Store one chunk of a blob; return the bytes held so far.

        Args:
            room: holds room for a number of bytes until they are here; raises a ServiceFailure if there is none.

        Raises:
            ServiceFailure: INVALID_ARGUMENT or QUOTA_EXCEEDED.
        """
        if digest in self._complete:
            return self._complete[digest][1]
        if digest not in self._begun:
            async with room(size):
                # Other chunks of the upload may have come in the meantime.
                if digest in self._complete:
                    return self._complete[digest][1]
                if digest not in self._begun:
                    self._begun[digest] = Upload(digest, size)
        upload = self._begun[digest]
        if upload.size != size:
            message = f"the upload {digest} was begun with {upload.size} bytes and goes on with {size}"
            raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message))
        upload.write(offset, data)
        if upload.complete:
            if upload.stored is None:
                upload.stored = asyncio.ensure_future(self._store(upload))
            await asyncio.shield(upload.stored)
        return upload.received

    async def _store(self, upload: Upload) -> None:
        try:
            data = await asyncio.to_thread(upload.finish)
            self._complete[upload.digest] = (await asyncio.to_thread(put, data), upload.size)
        finally:
            self._begun.pop(upload.digest, None)
