"""The leases of sessions: opens, finds, ends and replaces the sessions that clients have.

A lease outlives its session actor. What the archive holds of the session goes to another actor then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

import ray
from ray.actor import ActorHandle

from actors.account import Account
from actors.archive import Archive
from actors.background import Background
from actors.giving_way import Limit, chosen, reached, refusal, seconds_until
from actors.protocol import Lease, SessionStats, Terms, Work
from actors.session_pool import SessionPool

logger = logging.getLogger(__name__)

# Seconds between two looks whether a session gives way, while a client waits for a session.
LOOK_SECONDS = 0.25


class Leases:
    """All leases of a cluster; every method runs on the directory's event loop.

    Args:
        pool: the session actors.
        background: runs what outlives a call.
        account: what the tenants use of their quotas.
        ended: called with the id of each session whose lease has ended.

    Attributes:
        archive: what outlives session actors.
        done: the work of sessions that have ended, by tenant.
    """

    def __init__(
        self, pool: SessionPool, background: Background, account: Account, ended: Callable[[str], None]
    ) -> None:
        self.archive = Archive()
        self.done: defaultdict[str, Work] = defaultdict(Work)
        self._account = account
        self._pool = pool
        self._background = background
        self._ended = ended
        self._leases: dict[str, Lease] = {}
        self._replacing: dict[str, asyncio.Task[Lease | None]] = {}
        self._opening: Counter[str] = Counter()  # sessions that are being opened, by tenant
        self._queues: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a tenant's calls wait for a session

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._leases

    @property
    def all(self) -> tuple[Lease, ...]:
        """The leases that have not ended."""
        return tuple(self._leases.values())

    def get(self, session_id: str) -> Lease | None:
        """Return a lease by its session id; None if there is none."""
        return self._leases.get(session_id)

    async def open(self, tenant: str, kept: bool = False) -> Lease:
        """Open a session for a tenant; where there is no room, wait until another session gives way.

        Args:
            kept: whether the session's values stay until a client comes back for them.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, the tenant or the service has the largest number of sessions, and no session gave way.
        """
        session_id = secrets.token_hex(16)
        await self._admit(tenant)
        terms = self.terms_of(tenant)
        actor = await self._lend(tenant, session_id, lambda actor: actor.open.remote(session_id, kept, terms))
        if (now := self.terms_of(tenant)) != terms:
            actor.heed.remote(session_id, now)
        lease = self._leases[session_id] = Lease(session_id, tenant, actor)
        self.archive.begin(session_id, kept)
        return lease

    def find(self, session_id: str, tenant: str) -> Lease | None:
        """Return a tenant's lease by its session id.

        None if there is no such lease, or it belongs to another tenant.
        """
        lease = self._leases.get(session_id)
        return lease if lease is not None and lease.tenant == tenant else None

    async def close(self, session_id: str, tenant: str, keep_jobs: bool = False) -> bool:
        """End a lease; return whether there was one.

        Args:
            keep_jobs: let the session's jobs run on, if it has any. The session ends when the values of its last job have gone.
        """
        lease = self.find(session_id, tenant)
        if lease is None:
            return False
        if keep_jobs:
            try:
                left = await lease.actor.leave_jobs.remote(session_id)
            except ray.exceptions.ActorDiedError:
                lease = await self.recover(session_id, tenant, lease.actor)
                left = lease is not None and await lease.actor.leave_jobs.remote(session_id)
            if left:
                self.archive.leave(session_id)
                return True
        if (now := self.find(session_id, tenant)) is not None:  # the lease may have been replaced in the meantime
            await self.end(now)
        return True

    async def recover(self, session_id: str, tenant: str, dead: ActorHandle) -> Lease | None:
        """Give a session whose actor is dead to another actor; return the new lease.

        The new actor gets all that the archive holds of the session. None if the lease has ended.
        """
        lease = self.find(session_id, tenant)
        if lease is None or lease.actor != dead:
            return lease
        if session_id not in self._replacing:
            self._replacing[session_id] = self._background.spawn(self._replace(lease))
        return await asyncio.shield(self._replacing[session_id])

    async def end(self, lease: Lease) -> None:
        """End a lease and its session; a lease that was replaced stays."""
        if self._leases.get(lease.session_id) is not lease:
            return  # the lease has ended or was replaced, and the session's actor may hold other leases
        self.gone(lease.session_id)
        try:
            stats = await self._return(lease.session_id, lease.actor)
            if stats is not None:
                self.done[lease.tenant] += stats.done
        finally:
            # The traces that the session has just cancelled have settled; a session that is dead cannot settle any more.
            self._account.gone(lease.tenant, lease.session_id)

    def gone(self, session_id: str) -> None:
        """Drop all that was kept of a session whose lease has ended."""
        self._leases.pop(session_id, None)
        self.archive.end(session_id)
        self._ended(session_id)

    async def stats(self) -> dict[str, SessionStats]:
        """Return what each session holds and does, by session id.

        Sessions of dead actors are taken over by other actors.
        """
        stats = await self._pool.stats()
        for lease in self._leases.values():
            if not self._pool.has(lease.actor):
                self._background.spawn(self.recover(lease.session_id, lease.tenant, lease.actor))
        return stats

    async def _admit(self, tenant: str) -> None:
        """Make room for one more session; an idle session may have to end for it.

        Calls are served in the order in which they come.
        """
        patience = self._pool.settings.wait_seconds
        deadline = time.monotonic() + patience
        async with self._queues[tenant]:
            while (limit := self._reached(tenant)) is not None:
                stats = await self.stats()
                leases = [lease for lease in limit.leases if lease.session_id in self._leases]
                if (lease := chosen(leases, stats)) is not None:
                    await self.end(lease)
                elif time.monotonic() >= deadline:
                    wait = seconds_until(leases, stats)
                    self._account.refused(tenant, "sessions")
                    raise refusal(limit, patience, self._pool.settings.retention_seconds, wait)
                else:
                    await asyncio.sleep(LOOK_SECONDS)

    def _reached(self, tenant: str) -> Limit | None:
        """Return the limit that leaves no room for one more session of a tenant."""
        allowances = self._account.allowances
        return reached(tenant, self._leases.values(), self._opening, self._pool.settings, allowances)

    def terms_of(self, tenant: str) -> Terms:
        """Return the rules for a tenant's sessions."""
        settings = self._pool.settings
        counted = self._account.allowances.of(tenant).counted
        return Terms(settings.retention_seconds, settings.stored_bytes, settings.idle_seconds, counted)

    async def _lend(
        self, tenant: str, session_id: str, prepare: Callable[[ActorHandle], Awaitable[None]]
    ) -> ActorHandle:
        """Return a live session actor that holds the session of a tenant."""
        self._opening[tenant] += 1
        try:
            while True:
                actor = await self._pool.take()
                try:
                    await prepare(actor)
                except ray.exceptions.RayActorError:
                    self._pool.lost(actor)
                    continue
                except BaseException:
                    actor.close.remote(session_id)  # the actor may have opened the session or not
                    self._pool.leave(actor)
                    raise
                return actor
        finally:
            self._opening[tenant] -= 1

    async def _replace(self, lease: Lease) -> Lease | None:
        """Give a lease whose actor is dead another actor; None if the lease has ended."""
        session_id = lease.session_id
        try:
            if self._leases.get(session_id) is not lease:
                return None
            logger.warning("a session's actor is gone: another one takes over what it had finished")
            self._pool.lost(lease.actor)  # the actor may still live, and a session must not exist twice
            self._account.lost(session_id)
            kept = self.archive.of(session_id)
            actor = await self._lend(
                lease.tenant,
                session_id,
                lambda actor: actor.restore.remote(session_id, kept, self.terms_of(lease.tenant)),
            )
            if self._leases.get(session_id) is not lease:
                await self._return(session_id, actor)
                return None
            replaced = self._leases[session_id] = dataclasses.replace(lease, actor=actor)
            return replaced
        finally:
            del self._replacing[session_id]

    async def _return(self, session_id: str, actor: ActorHandle) -> SessionStats | None:
        """Make an actor end a session; None if the actor is dead."""
        try:
            stats: SessionStats | None = await actor.close.remote(session_id)
        except ray.exceptions.RayActorError:
            return None
        finally:
            self._pool.leave(actor)
        return stats
