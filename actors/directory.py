"""The directory: opens and finds sessions, owns saved values, and knows the engines' state.

A cluster has one directory, found by its name. It lives as long as ingress or engine replicas report to it. After a minute
without a report it ends the sessions and itself, so that a deleted application leaves nothing behind.

Size: each call that reaches the directory is a method.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.account import Account
from actors.allowance import Allowances
from actors.archive import KeptTrace
from actors.background import Background
from actors.edit_store import EditStore
from actors.failures import FULL, not_found, unavailable
from actors.key_store import KeyStore
from actors.leases import Leases
from actors.operations import Operations
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
    Work,
)
from actors.quota_use import Cost, Demand
from actors.replicas import ReplicaBoard
from actors.saved import Saved
from actors.session_pool import SessionPool
from actors.spilled import make_room, put
from actors.telemetry.counts import Counted
from actors.telemetry.options import Options
from actors.upload_store import UploadStore
from actors.variables import Copy
from interpose.contract.errors import ServiceFailure
from interpose.v1 import operator_pb2, service_pb2
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
SWEEP_SECONDS = 5.0


class Directory:
    """State of the directory; every method runs on the actor's event loop.

    Args:
        sessions: a `SessionSettings`.
    """

    def __init__(self, sessions: Any, made_under: str = "") -> None:
        self._settings = sessions
        self._made_under = made_under
        self._background = Background()
        self._board = ReplicaBoard()
        self._operations = Operations(self._board)
        self._pool = SessionPool(sessions, self._background.spawn, self._operations.take)
        self._account = Account(self._turn)
        self._leases = Leases(self._pool, self._background, self._account, self._board.left)
        self._edits = EditStore(sessions.max_edits, sessions.edit_bytes)
        self._uploads = UploadStore(sessions.kept_upload_bytes, sessions.kept_upload_seconds)
        self._keys = KeyStore()
        self._begun = time.monotonic()
        self._heard = time.monotonic()
        self._sweeping = False

    async def made_under(self) -> str:
        """The id of the Serve instance under which this directory was made (`serve_id`)."""
        return self._made_under

    async def heartbeat(self, targets: list[Target], sessions: Any, allowances: Allowances) -> tuple[Announced, ...]:
        """Note that an ingress replica lives and serves these engines.

        Args:
            targets: the engines that sessions should be ready for.
            sessions: the `SessionSettings` that hold from now on; the replica that made the directory may have had none.
            allowances: the quotas of all tenants that hold from now on.

        Returns:
            The models of all applications on the cluster.
        """
        self._settings = self._pool.settings = sessions
        self._edits.bound(sessions.max_edits, sessions.edit_bytes)
        self._uploads.bound(sessions.kept_upload_bytes, sessions.kept_upload_seconds)
        self._pool.targets = targets
        self._allow(allowances)
        self._alive()
        self._pool.fill()
        return self._board.announced()

    # Sessions

    async def open(self, tenant: str, kept: bool = False) -> Lease:
        """Open a session for a tenant (see `Leases.open`), unless the service is draining."""
        if self._board.closed:
            raise ServiceFailure(unavailable("the service is draining: it opens no sessions"))
        return await self._leases.open(tenant, kept)

    async def find(self, session_id: str, tenant: str) -> Lease | None:
        """Return a tenant's lease by its session id (see `Leases.find`)."""
        return self._leases.find(session_id, tenant)

    async def close(self, session_id: str, tenant: str, keep_jobs: bool = False) -> bool:
        """End a lease; return whether there was one (see `Leases.close`)."""
        return await self._leases.close(session_id, tenant, keep_jobs)

    async def recover(self, session_id: str, tenant: str, dead: ActorHandle) -> Lease | None:
        """Give a session whose actor is dead to another actor (see `Leases.recover`)."""
        return await self._leases.recover(session_id, tenant, dead)

    # What outlives a session actor

    async def adopt(self, session: ActorHandle, key: str, blob_id: str, data: np.ndarray) -> None:
        """Take ownership of one saved value, uint8 of shape [bytes], and tell the trace's session.

        Without this owner the value would be lost with the process that made it.
        """
        try:
            saved = Saved(await self._put(data), data.nbytes)
        except FULL:
            await session.no_room.remote(key)
        else:
            await session.adopt.remote(key, blob_id, saved)

    async def _put(self, data: np.ndarray) -> ray.ObjectRef:
        """Store bytes, uint8 of shape [bytes]; kept uploads give way: clients can send them again."""
        # Copying into the object store takes long enough to delay other calls.
        try:
            return await asyncio.to_thread(put, data)
        except FULL:
            if not self._uploads.clear():
                raise
        return await asyncio.to_thread(put, data)

    async def find_upload(self, session_id: str, digest: str, size: int) -> list[Any]:
        """Return the reference to an upload of the same tenant, or None, in a list.

        Raises:
            ServiceFailure: NOT_FOUND, the lease has ended.
        """
        return [self._uploads.find(self._lease(session_id).tenant, digest, size)]

    async def keep_upload(self, session_id: str, digest: str, refs: list[ray.ObjectRef], size: int) -> list[Any]:
        """Keep an upload for its tenant's later sessions (see `UploadStore.keep`); in a list.

        Raises:
            ServiceFailure: NOT_FOUND, the lease has ended.
        """
        tenant = self._lease(session_id).tenant
        quota = self._account.allowances.of(tenant).stored_bytes
        return [await self._uploads.keep(tenant, digest, refs[0], size, quota)]

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
        self._leases.archive.keep(session_id, trace, variables)

    async def drop(self, session_id: str, key: str) -> None:
        """Drop a trace that its session has forgotten."""
        self._leases.archive.drop(session_id, key)

    async def drop_variables(self, session_id: str) -> None:
        """Drop the variables that a session has forgotten."""
        self._leases.archive.drop_variables(session_id)

    # Engines

    async def report(self, report: ReplicaReport) -> str:
        """Note an engine replica's state.

        Returns:
            Why the replica must not serve; "" if it may.
        """
        self._alive()
        refusal = self._board.report(report)
        if not refusal:
            self._operations.reported(report)
        return refusal

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

    # Keys

    async def keys(self, book: Any, uses: Mapping[str, float]) -> Any:
        """Compare a process's book of keys with the newest (see `KeyStore.exchange`)."""
        return await self._keys.exchange(book, uses)

    async def revoke_key(self, tenant: str, label: str) -> Any:
        """Revoke a key (see `KeyStore.revoke`)."""
        return self._keys.revoke(tenant, label)

    async def key_uses(self) -> dict[str, float]:
        """Return when each key was used last (see `KeyStore.uses`)."""
        return self._keys.uses()

    async def status(self, targets: list[Target]) -> DirectoryStatus:
        """Return the state of these engines and all sessions, with fresh numbers from the sessions."""
        return DirectoryStatus(
            models={target: self._board.state(target) for target in targets},
            tenants=await self.usage(),
            sessions=len(self._leases),
            warm=self._pool.ready,
            uptime_seconds=time.monotonic() - self._begun,
        )

    async def usage(self) -> tuple[TenantUsage, ...]:
        """Return what each tenant uses, with fresh numbers from the sessions.

        Tenants without quotas that have used nothing are left out.
        """
        stats = await self._leases.stats()
        limited = [name for name, own in self._account.allowances.tenants.items() if own.limited]
        named = {*self._leases.done, *self._account.known, *limited}
        tenants: dict[str, list[SessionStats]] = {name: [] for name in named}
        for lease in self._leases.all:
            if lease.session_id in stats:
                tenants.setdefault(lease.tenant, []).append(stats[lease.session_id])
        return tuple(self._usage_of(name, held) for name, held in sorted(tenants.items()))

    def _usage_of(self, name: str, held: list[SessionStats]) -> TenantUsage:
        use = self._account.usage(name, len(held))
        return TenantUsage(
            name=name,
            sessions=len(held),
            traces_running=sum(one.traces_running for one in held),
            traces_waiting=use.waiting,
            done=sum((one.done for one in held), self._leases.done.get(name, Work())),
            stored_bytes=sum(one.stored_bytes for one in held),
            weight=self._account.allowances.of(name).weight,
            quotas=use.quotas,
            refused=use.refused,
        )

    # Quotas, which sessions ask about

    async def admit(self, session_id: str, key: str, demand: Demand) -> bool:
        """Admit a trace of a session; return whether it may run now (see `Account.admit`).

        Raises:
            ServiceFailure: QUOTA_EXCEEDED; or NOT_FOUND, the lease has ended.
        """
        return self._account.admit(self._lease(session_id).tenant, session_id, key, demand)

    async def settle(self, key: str, cost: Cost) -> None:
        """End what a trace owes (see `Account.settle`)."""
        self._account.settle(key, cost)

    async def hold(self, session_id: str, stored: int, saved: int, frees_in: float) -> None:
        """Note the bytes that a session holds, or is about to hold (see `Account.hold`).

        Raises:
            ServiceFailure: QUOTA_EXCEEDED; or NOT_FOUND, the lease has ended.
        """
        self._account.hold(self._lease(session_id).tenant, session_id, stored, saved, frees_in)

    # Operators

    async def telemetry(self, options: Options, counted: Counted) -> None:
        """Take what an ingress replica counted.

        Args:
            options: what the session actors write for operators.
            counted: what the replica counted since the last call.
        """
        self._pool.options = options
        self._operations.take(counted)

    async def traces(self, tenant: str, model: str, most: int) -> operator_pb2.ListTracesReply:
        """Return the traces that wait or run (see `Operations.traces`)."""
        return await self._operations.traces(self._pool, tenant, model, most)

    async def cancel_trace(self, key: str) -> bool:
        """Cancel a trace by its key; return whether it was running."""
        return await self._operations.cancel(self._pool, key)

    async def drain(self, target: Target | None, model: str, replica: str, end: bool) -> operator_pb2.DrainReply | None:
        """Make replicas take no new traces, or take them again (see `Operations.drain`)."""
        return await self._operations.drain(self._pool, target, model, replica, end)

    async def used(self, tenant: str) -> operator_pb2.GetUsageReply:
        """Return what tenants have used (see `Operations.usage`), with what was counted up to now."""
        await self._pool.collect()
        return self._operations.usage(tenant)

    async def end_sessions(self) -> None:
        """End all sessions at once.

        Their clients are told that the session is gone, and engines stop working on its traces.
        """
        for lease in self._leases.all:
            self._leases.gone(lease.session_id)
        self._pool.end()

    async def shutdown(self) -> None:
        """End all sessions, then this actor."""
        await self.end_sessions()
        ray.kill(ray.get_runtime_context().current_actor)

    # Internal

    def _lease(self, session_id: str) -> Lease:
        lease = self._leases.get(session_id)
        if lease is None:
            raise not_found("the session has ended; open a new one")
        return lease

    def _turn(self, session_id: str, key: str) -> None:
        """Tell a session that a trace of it may run now."""
        lease = self._leases.get(session_id)
        if lease is not None:
            lease.actor.turn.remote(session_id, key)

    def _allow(self, allowances: Allowances) -> None:
        """Set the quotas; sessions are told if they have to ask from now on, or no more."""
        if allowances == self._account.allowances:
            return
        self._account.allowances = allowances
        for lease in self._leases.all:
            lease.actor.heed.remote(lease.session_id, self._leases.terms_of(lease.tenant))

    def _alive(self) -> None:
        """Note that a replica of this directory's service lives."""
        self._heard = time.monotonic()
        if not self._sweeping:
            self._sweeping = True
            self._background.spawn(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._uploads.sweep()
            if time.monotonic() - self._heard > SILENCE_SECONDS:
                logger.warning("no ingress and no engine for %g s: ending all sessions", SILENCE_SECONDS)
                await self.shutdown()
            try:
                await asyncio.to_thread(make_room)
            except (OSError, psutil.Error):
                logger.warning("what failed writes left on the disk could not be removed", exc_info=True)
            found = await self._leases.stats()
            owing = {session_id: stats.owing for session_id, stats in found.items()}
            self._account.reconcile(owing, {lease.session_id for lease in self._leases.all})
            try:
                await self._operations.look(self._pool, self._leases, found)
            except Exception:
                logger.exception("the metrics could not be exported")
            for session_id, stats in found.items():
                lease = self._leases.get(session_id)
                if lease is not None and stats.idle_seconds > self._settings.idle_seconds:
                    await self._leases.end(lease)
