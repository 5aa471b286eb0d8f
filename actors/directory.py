"""The directory: opens and finds sessions, owns saved values, and knows the engines' state.

A cluster has one directory, found by its name. It lives as long as ingress or engine replicas report to it. After a minute
without a report it ends the sessions and itself, so that a deleted application leaves nothing behind.

Size: a method for each message to the directory.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np
import psutil
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.archive import Archive, KeptTrace
from actors.edit_store import EditStore
from actors.failures import FULL
from actors.giving_way import chosen, reached, refusal, seconds_until
from actors.placement import remote
from actors.protocol import (
    Announced,
    DirectoryStatus,
    Lease,
    ModelState,
    ReplicaReport,
    SessionStats,
    StartFailed,
    Target,
    TenantUsage,
    Terms,
)
from actors.replicas import ReplicaBoard
from actors.saved import Saved
from actors.session_pool import SessionPool
from actors.spilled import make_room, put
from actors.variables import Copy
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
SWEEP_SECONDS = 5.0
# Seconds between two looks whether a session gives way, while a client waits for a session.
LOOK_SECONDS = 0.25

T = TypeVar("T")


class Directory:
    """State of the directory; every method runs on the actor's event loop.

    Args:
        sessions: a `SessionSettings`.
    """

    def __init__(self, sessions: Any, made_under: str = "") -> None:
        self._settings = sessions
        self._made_under = made_under
        self._pool = SessionPool(sessions, self._spawn)
        self._leases: dict[str, Lease] = {}
        self._archive = Archive()
        self._replacing: dict[str, asyncio.Task[Lease | None]] = {}
        self._opening: Counter[str] = Counter()  # sessions that are being opened, by tenant
        self._queues: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a tenant's calls wait for a session
        self._board = ReplicaBoard()
        self._edits = EditStore(sessions.max_edits, sessions.edit_bytes)
        self._done: Counter[str] = Counter()
        self._begun = time.monotonic()
        self._heard = time.monotonic()
        self._sweeping = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def made_under(self) -> str:
        """The id of the Serve instance under which this directory was made (`serve_id`)."""
        return self._made_under

    async def heartbeat(self, targets: list[Target], sessions: Any) -> tuple[Announced, ...]:
        """Note that an ingress replica lives and serves these engines.

        Args:
            targets: the engines that sessions should be ready for.
            sessions: the `SessionSettings` that hold from now on; the replica that made the directory may have had none.

        Returns:
            The models of all applications on the cluster.
        """
        self._settings = self._pool.settings = sessions
        self._edits.bound(sessions.max_edits, sessions.edit_bytes)
        self._pool.targets = targets
        self._alive()
        self._pool.fill()
        return self._board.announced()

    # Sessions

    async def open(self, tenant: str, kept: bool = False) -> Lease:
        """Open a session for a tenant; where there is no room, wait until another session gives way.

        Args:
            kept: whether the session's values stay until a client comes back for them.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, the tenant or the service has the largest number of sessions, and no session gave way.
        """
        session_id = secrets.token_hex(16)
        await self._admit(tenant)
        actor = await self._lend(tenant, session_id, lambda actor: actor.open.remote(session_id, kept, self._terms))
        lease = self._leases[session_id] = Lease(session_id, tenant, actor)
        self._archive.begin(session_id, kept)
        return lease

    async def find(self, session_id: str, tenant: str) -> Lease | None:
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
        lease = await self.find(session_id, tenant)
        if lease is None:
            return False
        if keep_jobs:
            try:
                left = await lease.actor.leave_jobs.remote(session_id)
            except ray.exceptions.ActorDiedError:
                lease = await self.recover(session_id, tenant, lease.actor)
                left = lease is not None and await lease.actor.leave_jobs.remote(session_id)
            if left:
                self._archive.leave(session_id)
                return True
        if (now := await self.find(session_id, tenant)) is not None:  # the lease may have been replaced in the meantime
            await self._end(now)
        return True

    # What outlives a session actor

    async def adopt(self, session: ActorHandle, key: str, blob_id: str, data: np.ndarray) -> None:
        """Take ownership of one saved value, uint8 of shape [bytes], and tell the trace's session.

        Without this owner the value would be lost with the process that made it.
        """
        # Copying into the object store takes long enough to delay other calls.
        try:
            saved = Saved(await asyncio.to_thread(put, data), data.nbytes)
        except FULL:
            await session.no_room.remote(key)
        else:
            await session.adopt.remote(key, blob_id, saved)

    async def make_room(self, node: str) -> int:
        """Remove the rest of failed writes on a node's disk; return the bytes freed.

        Called for a worker on that node that has no room.
        """
        if node == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(make_room)
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return int(await remote(make_room).options(num_cpus=0, scheduling_strategy=there).remote())

    async def keep(self, session_id: str, trace: KeptTrace, variables: Mapping[str, Copy]) -> None:
        """Store a trace's outcome (see `Archive.keep`)."""
        self._archive.keep(session_id, trace, variables)

    async def drop(self, session_id: str, key: str) -> None:
        """Drop a trace that its session has forgotten."""
        self._archive.drop(session_id, key)

    async def drop_variables(self, session_id: str) -> None:
        """Drop the variables that a session has forgotten."""
        self._archive.drop_variables(session_id)

    async def recover(self, session_id: str, tenant: str, dead: ActorHandle) -> Lease | None:
        """Give a session whose actor is dead to another actor; return the new lease.

        The new actor gets all that the archive holds of the session. None if the lease has ended.
        """
        lease = await self.find(session_id, tenant)
        if lease is None or lease.actor != dead:
            return lease
        if session_id not in self._replacing:
            self._replacing[session_id] = self._spawn(self._replace(lease))
        return await asyncio.shield(self._replacing[session_id])

    # Engines

    async def report(self, report: ReplicaReport) -> str:
        """Note an engine replica's state.

        Returns:
            Why the replica must not serve; "" if it may.
        """
        self._alive()
        return self._board.report(report)

    async def start_failure(self, target: Target, model: Any, attempt: str) -> StartFailed | None:
        """Return why an engine replica must not try to start (see `ReplicaBoard.start_failure`)."""
        return self._board.start_failure(target, model, attempt)

    async def worker_stage(self, replica: str, rank: int, stage: str) -> None:
        """Note how far a worker of a loading replica has come."""
        self._board.worker(replica, rank, stage)

    async def announced(self) -> tuple[Announced, ...]:
        """Return the models of all applications."""
        return self._board.announced()

    async def model_state(self, target: Target) -> ModelState:
        """Return the state of a model, over all its replicas."""
        return self._board.state(target)

    async def place(self, session_id: str, target: Target) -> tuple[str, ModelState]:
        """Return the replica for a session's traces, and the model's state.

        See `ReplicaBoard.place`. A session that has ended gets no replica: nothing would release the replica again.
        """
        replica = self._board.place(session_id, target) if session_id in self._leases else ""
        return replica, self._board.state(target)

    async def moved(self, session_id: str, target: Target, replica: str) -> None:
        """Note that another replica than the session's own has taken its trace."""
        self._board.moved(session_id, target, replica)

    async def lost(self, replica: str) -> None:
        """Note that an engine replica is dead."""
        self._board.lost(replica)

    # Standing edits outlive engines, ingress replicas and sessions, and end with the service

    async def store_edit(self, tenant: str, model: str, edit: pb.Edit) -> None:
        """Store an edit (see `EditStore.put`)."""
        self._edits.put(tenant, model, edit)

    async def edits(self, tenant: str, model: str, names: list[str]) -> tuple[bytes, ...]:
        """Return edits by name, serialized (see `EditStore.get`)."""
        return self._edits.get(tenant, model, names)

    async def list_edits(self, tenant: str, model: str) -> service_pb2.ListEditsReply:
        """List a tenant's edits of a model."""
        return self._edits.list(tenant, model)

    async def clear_edits(self, tenant: str, model: str, name: str) -> int:
        """Drop one edit, or all edits for the name ""; return the number of dropped edits."""
        return self._edits.clear(tenant, model, name)

    async def status(self, targets: list[Target]) -> DirectoryStatus:
        """Return the state of these engines and all sessions, with fresh numbers from the sessions."""
        stats = await self._stats()
        tenants: dict[str, list[SessionStats]] = {name: [] for name in self._done}
        for lease in self._leases.values():
            if lease.session_id in stats:
                tenants.setdefault(lease.tenant, []).append(stats[lease.session_id])
        return DirectoryStatus(
            models={target: self._board.state(target) for target in targets},
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
            warm=self._pool.ready,
            uptime_seconds=time.monotonic() - self._begun,
        )

    async def end_sessions(self) -> None:
        """End all sessions at once.

        Their clients are told that the session is gone, and engines stop working on its traces.
        """
        for session_id in list(self._leases):
            self._gone(session_id)
        self._pool.end()

    async def shutdown(self) -> None:
        """End all sessions, then this actor."""
        await self.end_sessions()
        ray.kill(ray.get_runtime_context().current_actor)

    # Internal

    @property
    def _terms(self) -> Terms:
        settings = self._settings
        return Terms(settings.retention_seconds, settings.stored_bytes, settings.idle_seconds)

    def _alive(self) -> None:
        """Note that a replica of this directory's service lives."""
        self._heard = time.monotonic()
        if not self._sweeping:
            self._sweeping = True
            self._spawn(self._sweep())

    async def _admit(self, tenant: str) -> None:
        """Make room for one more session; an idle session may have to end for it.

        Calls are served in the order in which they come.
        """
        patience = self._settings.wait_seconds
        deadline = time.monotonic() + patience
        async with self._queues[tenant]:
            while (limit := reached(tenant, self._leases.values(), self._opening, self._settings)) is not None:
                stats = await self._stats()
                leases = [lease for lease in limit.leases if lease.session_id in self._leases]
                if (lease := chosen(leases, stats)) is not None:
                    await self._end(lease)
                elif time.monotonic() >= deadline:
                    wait = seconds_until(leases, stats)
                    raise refusal(limit, patience, self._settings.retention_seconds, wait)
                else:
                    await asyncio.sleep(LOOK_SECONDS)

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
            kept = self._archive.of(session_id)
            actor = await self._lend(
                lease.tenant, session_id, lambda actor: actor.restore.remote(session_id, kept, self._terms)
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

    async def _end(self, lease: Lease) -> None:
        if self._leases.get(lease.session_id) is not lease:
            return  # the lease has ended or was replaced, and the session's actor may hold other leases
        self._gone(lease.session_id)
        stats = await self._return(lease.session_id, lease.actor)
        if stats is not None:
            self._done[lease.tenant] += stats.traces_done

    def _gone(self, session_id: str) -> None:
        """Drop all that was kept of a session whose lease has ended."""
        self._leases.pop(session_id, None)
        self._archive.end(session_id)
        self._board.left(session_id)

    async def _stats(self) -> dict[str, SessionStats]:
        """Return what each session holds and does, by session id.

        Sessions of dead actors are taken over by other actors.
        """
        stats = await self._pool.stats()
        for lease in self._leases.values():
            if not self._pool.has(lease.actor):
                self._spawn(self.recover(lease.session_id, lease.tenant, lease.actor))
        return stats

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if time.monotonic() - self._heard > SILENCE_SECONDS:
                logger.warning("no ingress and no engine for %g s: ending all sessions", SILENCE_SECONDS)
                await self.shutdown()
            try:
                await asyncio.to_thread(make_room)
            except (OSError, psutil.Error):
                logger.warning("what failed writes left on the disk could not be removed", exc_info=True)
            for session_id, stats in (await self._stats()).items():
                lease = self._leases.get(session_id)
                if lease is not None and stats.idle_seconds > self._settings.idle_seconds:
                    await self._end(lease)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # A separate context: otherwise Ray cancels this call together with the client's call.
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
