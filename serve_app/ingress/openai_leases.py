"""Sessions that requests of the OpenAI-compatible endpoint share.

A client of the endpoint opens no session. The requests of a tenant share a few, so that they spread over the model's replicas,
and none of them stays open when no request needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from actors.protocol import Lease
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.sessions import SessionCalls
from serve_app.settings import Tenant

# Requests in one session, before another session is opened; sessions of one tenant.
_REQUESTS, _SESSIONS = 8, 8
# Seconds for which an unused session stays open.
_IDLE_SECONDS = 3.0


@dataclass(eq=False)
class _Shared:
    lease: Lease
    requests: int = 0
    closing: asyncio.TimerHandle | None = None


class SharedLeases:
    """The shared sessions of all tenants.

    Args:
        sessions: opens and closes sessions.
    """

    def __init__(self, sessions: SessionCalls) -> None:
        self._sessions = sessions
        self._open: defaultdict[str, list[_Shared]] = defaultdict(list)
        self._closings: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def lease(self, tenant: Tenant) -> AsyncIterator[Lease]:
        """Hold a session of the tenant for one request.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, the tenant has no session and gets none.
        """
        shared = await self._found(tenant)
        shared.requests += 1
        if shared.closing is not None:
            shared.closing.cancel()
            shared.closing = None
        try:
            yield shared.lease
        finally:
            shared.requests -= 1
            if not shared.requests:
                seconds = _IDLE_SECONDS if shared in self._open[tenant.name] else 0.0
                later = asyncio.get_running_loop().call_later
                shared.closing = later(seconds, self._close, tenant.name, shared)

    def forget(self, tenant: Tenant, lease: Lease) -> None:
        """Use a session for no further request, because it may have ended."""
        held = self._open[tenant.name]
        held[:] = [shared for shared in held if shared.lease.session_id != lease.session_id]

    async def _found(self, tenant: Tenant) -> _Shared:
        held = self._open[tenant.name]
        least = min(held, key=lambda shared: shared.requests, default=None)
        if least is not None and (least.requests < _REQUESTS or len(held) >= _SESSIONS):
            return least
        try:
            shared = _Shared(await self._sessions.open(tenant))
        except Exception as error:
            if least is not None and _is_quota(error):
                return least
            raise
        self._open[tenant.name].append(shared)
        return shared

    def _close(self, tenant: str, shared: _Shared) -> None:
        if shared.requests:
            return
        held = self._open[tenant]
        if shared in held:
            held.remove(shared)
        if not held:
            del self._open[tenant]
        task = asyncio.get_running_loop().create_task(self._closed(shared.lease))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _closed(self, lease: Lease) -> None:
        with contextlib.suppress(Exception):  # a session that has ended already
            await self._sessions.close(lease)


def _is_quota(error: Exception) -> bool:
    cause = getattr(error, "cause", error)
    return isinstance(cause, ServiceFailure) and cause.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
