"""The directory: keeps sessions warm, lends them, finds them by id, and knows how the engines are.

There is one in a cluster, by name. It belongs to the ingress replicas: while one of them beats its heart the directory
lives; when none has for a minute it ends the sessions and itself, so that a deleted application leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.edit_store import EditStore
from actors.naming import DIRECTORY, NAMESPACE, SESSION_PREFIX
from actors.placement import on_the_head
from actors.protocol import DirectoryStatus, Lease, ModelState, ReplicaReport, SessionStats, Target, TenantUsage
from actors.replicas import ReplicaBoard
from actors.session import Session
from interpose.errors import ServiceFailure, failure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
SWEEP_SECONDS = 5.0
REFILL_SECONDS = 0.25
# When there is no room, a session that was idle this long gives way: clients that are killed do not close theirs.
FORGOTTEN_SECONDS = 60.0


class Directory:
    """State of the directory; every method runs on the actor's event loop.

    Args:
        sessions: a `SessionSettings`.
    """

    def __init__(self, sessions: Any) -> None:
        self._settings = sessions
        self._targets: list[Target] = []
        self._leases: dict[str, Lease] = {}
        self._warm: asyncio.Queue[ActorHandle] = asyncio.Queue()
        self._opening = 0
        self._starting = 0
        self._board = ReplicaBoard()
        self._edits = EditStore(sessions.max_edits, sessions.edit_bytes)
        self._done: Counter[str] = Counter()
        self._begun = time.monotonic()
        self._heard = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def heartbeat(self, targets: list[Target]) -> None:
        """An ingress replica lives and serves these engines."""
        self._heard = time.monotonic()
        if not self._targets:
            self._targets = targets
            self._spawn(self._sweep())
        self._targets = targets
        self._refill()

    # Sessions

    async def open(self, tenant: str, kept: bool = False) -> Lease:
        """Lend a session to a tenant.

        Args:
            kept: whether its values stay for whoever comes back for them.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, the tenant or the service has as many as it may.
        """
        await self._admit(tenant)
        self._opening += 1
        try:
            while True:
                if self._warm.empty():
                    self._refill()
                lease = Lease(secrets.token_hex(16), tenant, await self._warm.get())
                try:
                    await lease.actor.open.remote(lease.session_id, kept)
                except ray.exceptions.RayActorError:
                    continue
                self._leases[lease.session_id] = lease
                return lease
        finally:
            self._opening -= 1
            # An actor that starts takes a processor for a second, which this client's first trace needs more.
            asyncio.get_running_loop().call_later(REFILL_SECONDS, self._refill)

    async def find(self, session_id: str, tenant: str) -> Lease | None:
        """Return a tenant's lease by its session id; None if there is none, or it is another's."""
        lease = self._leases.get(session_id)
        return lease if lease is not None and lease.tenant == tenant else None

    async def close(self, session_id: str, tenant: str, keep_jobs: bool = False) -> bool:
        """End a lease; the session is emptied and kept warm if one is wanted. Returns whether there was one.

        Args:
            keep_jobs: leave the session its jobs, if it has any; it is ended when the last one's values have gone.
        """
        lease = await self.find(session_id, tenant)
        if lease is None:
            return False
        with contextlib.suppress(ray.exceptions.RayActorError):
            if keep_jobs and await lease.actor.leave_jobs.remote():
                return True
        await self._end(lease)
        return True

    async def forget(self, session_id: str) -> None:
        """A session's actor is dead."""
        self._leases.pop(session_id, None)

    # Engines

    async def report(self, report: ReplicaReport) -> None:
        """An engine replica says how it is."""
        self._board.report(report)

    async def model_state(self, deployment: str) -> ModelState:
        """Return how a model is, over all its replicas."""
        return self._board.state(deployment)

    # Standing edits: they outlive engines, ingress replicas and sessions, and end with the service

    async def store_edit(self, tenant: str, model: str, edit: pb.Edit) -> None:
        """Keep an edit; see `EditStore.put`."""
        self._edits.put(tenant, model, edit)

    async def edits(self, tenant: str, model: str, names: list[str]) -> tuple[bytes, ...]:
        """Return edits by name, serialized; see `EditStore.get`."""
        return self._edits.get(tenant, model, names)

    async def list_edits(self, tenant: str, model: str) -> service_pb2.ListEditsReply:
        """Return what edits there are."""
        return self._edits.list(tenant, model)

    async def clear_edits(self, tenant: str, model: str, name: str) -> int:
        """Drop one edit, or all for the name ""; returns how many there were."""
        return self._edits.clear(tenant, model, name)

    async def status(self) -> DirectoryStatus:
        """Return everything the directory knows, with fresh numbers from the sessions."""
        leases = list(self._leases.values())
        stats = await asyncio.gather(*(self._stats(lease) for lease in leases))
        tenants: dict[str, list[SessionStats]] = {name: [] for name in self._done}
        for lease, one in zip(leases, stats, strict=True):
            if one is not None:
                tenants.setdefault(lease.tenant, []).append(one)
        return DirectoryStatus(
            models={target.deployment: self._board.state(target.deployment) for target in self._targets},
            tenants=tuple(
                TenantUsage(
                    name=name,
                    sessions=len(held),
                    traces_running=sum(one.traces_running for one in held),
                    traces_done=self._done[name] + sum(one.traces_done for one in held),
                    stored_bytes=sum(one.stored_bytes for one in held),
                )
                for name, held in sorted(tenants.items())
            ),
            sessions=len(self._leases),
            warm=self._warm.qsize(),
            uptime_seconds=time.monotonic() - self._begun,
        )

    async def shutdown(self) -> None:
        """End all sessions, then this actor."""
        for lease in list(self._leases.values()):
            ray.kill(lease.actor)
        while not self._warm.empty():
            ray.kill(self._warm.get_nowait())
        ray.kill(ray.get_runtime_context().current_actor)

    # Its own

    async def _admit(self, tenant: str) -> None:
        """Make sure there may be one more session, at the cost of one that was left behind if need be."""
        settings = self._settings
        own = [lease for lease in self._leases.values() if lease.tenant == tenant]
        if len(own) >= settings.max_per_tenant:
            what, candidates = f"{tenant} has {len(own)} sessions open, the most a tenant may have", own
        elif len(self._leases) + self._opening >= settings.max_sessions:
            what = f"all {settings.max_sessions} sessions of the service are taken"
            candidates = list(self._leases.values())
        else:
            return
        if not await self._end_forgotten(candidates):
            message = (
                f"{what}: close one, or try again when one has not been used for {FORGOTTEN_SECONDS:g} s; one that keeps "
                f"results of jobs, or was opened to be kept, stays for {self._settings.retention_seconds:g} s"
            )
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=SWEEP_SECONDS))

    async def _end_forgotten(self, leases: list[Lease]) -> bool:
        """End the session that was idle longest, if it was idle long enough; returns whether one was ended."""
        stats = await asyncio.gather(*(self._stats(lease) for lease in leases))
        idle = [(one.idle_seconds, lease) for lease, one in zip(leases, stats, strict=True) if one is not None]
        if len(idle) < len(leases):
            return True
        seconds, lease = max(idle, key=lambda pair: pair[0])
        if seconds < FORGOTTEN_SECONDS:
            return False
        await self._end(lease)
        return True

    def _refill(self) -> None:
        wanted = self._settings.warm + self._opening - self._warm.qsize() - self._starting
        for _ in range(wanted):
            self._starting += 1
            self._spawn(self._start_session())

    async def _start_session(self) -> None:
        name = SESSION_PREFIX + secrets.token_hex(8)
        settings = self._settings
        try:
            here = ray.get_runtime_context().current_actor
            actor = (
                ray.remote(Session)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    num_cpus=0,
                    max_concurrency=1000,
                    max_restarts=0,
                    scheduling_strategy=await asyncio.to_thread(on_the_head),
                )
                .remote(name, here, settings.retention_seconds, settings.stored_bytes, settings.idle_seconds)
            )
            await actor.prepare.remote(self._targets)
            self._warm.put_nowait(actor)
        except Exception:
            logger.exception("a session actor did not start")
        finally:
            self._starting -= 1

    async def _end(self, lease: Lease) -> None:
        self._leases.pop(lease.session_id, None)
        try:
            stats: SessionStats = await lease.actor.close.remote()
        except ray.exceptions.RayActorError:
            return
        self._done[lease.tenant] += stats.traces_done
        if self._warm.qsize() < self._settings.warm + self._opening:
            self._warm.put_nowait(lease.actor)
        else:
            ray.kill(lease.actor)

    async def _stats(self, lease: Lease) -> SessionStats | None:
        try:
            return await lease.actor.stats.remote()
        except ray.exceptions.RayActorError:
            self._leases.pop(lease.session_id, None)
            return None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if time.monotonic() - self._heard > SILENCE_SECONDS:
                logger.warning("no ingress for %g s: ending all sessions", SILENCE_SECONDS)
                await self.shutdown()
            for lease in list(self._leases.values()):
                stats = await self._stats(lease)
                if stats is not None and stats.idle_seconds > self._settings.idle_seconds:
                    await self._end(lease)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def directory(sessions: Any) -> ActorHandle:
    """Return the cluster's directory; make it if there is none.

    Args:
        sessions: the `SessionSettings` of a new one.
    """
    return (
        ray.remote(Directory)
        .options(
            name=DIRECTORY,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=0,
            scheduling_strategy=on_the_head(),
        )
        .remote(sessions)
    )
