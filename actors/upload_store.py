"""The uploads of tenants that outlive their sessions, by tenant and digest.

A client that sends an autoencoder's weights once finds them in each later session of its tenant. A tenant sees nothing of the
uploads of another tenant: not their bytes, and not whether they are there.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.spilled import put


@dataclass
class _Kept:
    """An upload.

    Attributes:
        ref: reference to the bytes, uint8 of shape [size], which the directory owns.
        size: number of bytes.
        used: when a session last asked for it, on the monotonic clock.
    """

    ref: Any
    size: int
    used: float


class UploadStore:
    """Holds complete uploads, whose digests sessions have checked.

    Args:
        max_bytes: bytes that one tenant's uploads may have together; 0: none are kept.
        seconds: how long an upload is kept after its last use.
        copied: copies the bytes that a reference stands for; returns the copy's reference.
    """

    def __init__(self, max_bytes: int, seconds: float, copied: Callable[[Any], Awaitable[Any]] | None = None) -> None:
        self._copied = copied or _copied
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}  # the uploads of each tenant, used longest ago first

    def bound(self, max_bytes: int, seconds: float) -> None:
        """Set the limits from now on."""
        self._max_bytes, self._seconds = max_bytes, seconds

    def find(self, tenant: str, digest: str, size: int) -> Any:
        """Return the reference to a tenant's upload; None if there is none of this digest and size."""
        kept = self._kept.get(tenant, OrderedDict()).get(digest)
        if kept is None or kept.size != size:
            return None
        kept.used = time.monotonic()
        self._kept[tenant].move_to_end(digest)
        return kept.ref

    def has_room(self, tenant: str, size: int, quota: int | None) -> bool:
        """Make room for one more upload of a tenant; return whether there is room.

        The uploads that the tenant used longest ago go.

        Args:
            quota: the bytes that the tenant may store; None: there is no such quota.
        """
        most = self._max_bytes if quota is None else min(self._max_bytes, quota)
        if size > most:
            return False
        own = self._kept.get(tenant, OrderedDict())
        while self.bytes_of(tenant) + size > most:
            own.popitem(last=False)
        return True

    async def keep(self, tenant: str, digest: str, ref: Any, size: int, quota: int | None) -> Any:
        """Keep an upload of a tenant, if there is room.

        Args:
            ref: reference to the bytes, uint8 of shape [size], which a session owns.
            quota: as of `has_room`.

        Returns:
            The reference to use from now on; None: the upload is not kept.
        """
        if not self.has_room(tenant, size, quota):
            return None
        try:
            # The session's actor may end before the tenant's next session begins, and its values with it.
            own = await self._copied(ref)
        except RayError:  # also: there is no room
            return None
        known = self.find(tenant, digest, size)  # another session may have been quicker
        if known is None and self.has_room(tenant, size, quota):
            self._kept.setdefault(tenant, OrderedDict())[digest] = _Kept(own, size, time.monotonic())
        return own if known is None else known

    def bytes_of(self, tenant: str) -> int:
        """Return the bytes of a tenant's uploads."""
        return sum(kept.size for kept in self._kept.get(tenant, {}).values())

    def sweep(self) -> None:
        """Drop uploads that no session has asked for in time."""
        since = time.monotonic() - self._seconds
        for tenant, own in list(self._kept.items()):
            while own and next(iter(own.values())).used < since:
                own.popitem(last=False)
            if not own:
                del self._kept[tenant]

    def clear(self) -> bool:
        """Drop all uploads, whose room others need; return whether there were any."""
        there = any(self._kept.values())
        self._kept.clear()
        return there


async def _copied(ref: Any) -> Any:
    """Return a reference to a copy of bytes in the object store, which this actor owns."""
    return await asyncio.to_thread(put, await ref)
