"""The uploads of one session, complete and begun.

The directory keeps complete uploads for the later sessions of the tenant (`actors.upload_store`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import ray
from ray.exceptions import RayError

from actors.spilled import put
from actors.upload import Upload
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb


class Uploads:
    """Blobs that a client has uploaded to one session, or to an earlier session of the tenant.

    Args:
        directory: handle of the directory.
        session_id: the session, by which the directory knows the tenant.
    """

    def __init__(self, directory: Any, session_id: str) -> None:
        self._directory = directory
        self._session_id = session_id
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
                kept = await self._kept(digest, size)
                # Other chunks of the upload may have come in the meantime.
                if digest not in self._complete and digest not in self._begun and kept is not None:
                    self._complete[digest] = kept, size
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
            ref = await asyncio.to_thread(put, data)
            self._complete[upload.digest] = (await self._keep(upload, ref) or ref, upload.size)
        finally:
            self._begun.pop(upload.digest, None)

    async def _kept(self, digest: str, size: int) -> ray.ObjectRef | None:
        """Return a reference to an upload of an earlier session; None if there is none."""
        try:
            [ref] = await self._directory.find_upload.remote(self._session_id, digest, size)
        except (RayError, ServiceFailure):  # then the client sends it again
            return None
        return ref

    async def _keep(self, upload: Upload, ref: ray.ObjectRef) -> ray.ObjectRef | None:
        """Keep an upload for later sessions; return the reference to use from now on, if another."""
        try:
            # In a list a reference travels as it is, and not as what it refers to.
            [kept] = await self._directory.keep_upload.remote(self._session_id, upload.digest, [ref], upload.size)
        except (RayError, ServiceFailure):
            return None
        return kept
