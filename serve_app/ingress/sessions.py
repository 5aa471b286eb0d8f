"""Calls sessions for the ingress, and finds again the sessions whose actor has died."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from actors.failures import describe, not_found, unavailable
from actors.grouped import SMALL_BYTES, Grouped, Item
from actors.protocol import Lease, ModelState, Target
from actors.saved import Saved
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart, kind_of
from interpose.wire.request import TraceRequest
from serve_app.ingress.calls import Serialized
from serve_app.settings import Tenant
from serve_app.tenants.admission import Remotes

_MAX_CACHED_LEASES = 4096
_MAX_ACTORS = 256
# Methods that cannot be repeated at the actor that takes a dead actor's place. Uploads are gone, and clients send them again. The
# ingress of a plain request has called the dead actor.
_NOT_AGAIN = ("run", "start", "plain")
# Seconds for which the replica of a session is remembered.
REPLICA_SECONDS = 1.0


class SessionCalls:
    """Opens, finds and calls sessions; keeps the leases that it has found.

    Args:
        directory: handle of the directory.

    Attributes:
        directory: as given; the ingress replaces it if the directory has died.
    """

    def __init__(self, directory: ActorHandle) -> None:
        self.directory = directory
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        self._following: dict[ActorHandle, Grouped[tuple[Any, ...]]] = {}
        self._replicas: dict[tuple[str, Target], tuple[str, ModelState, float]] = {}

    def replace_directory(self, directory: ActorHandle) -> None:
        """Use another directory, which knows none of the leases found so far."""
        self._leases.clear()
        self._replicas.clear()
        self.directory = directory

    async def open(self, tenant: Tenant, kept: bool = False) -> Lease:
        """Open a session for a tenant.

        Args:
            kept: whether the session's values stay until a client comes back for them.
        """
        return self._cache(await self.directory.open.remote(tenant.name, kept))

    async def close(self, lease: Lease) -> None:
        """End a session."""
        await self.end(lease.session_id, lease.tenant)

    async def end(self, session_id: str, tenant: str, keep_jobs: bool = False) -> None:
        """End the lease of a session, if there is one.

        Args:
            keep_jobs: let the session's jobs run on.
        """
        self._leases.pop(session_id, None)
        await self.directory.close.remote(session_id, tenant, keep_jobs)

    async def lease(self, session_id: str, tenant: Tenant) -> Lease:
        """Return the lease of a tenant's session.

        Raises:
            ServiceFailure: NOT_FOUND, the session does not exist, has ended, or belongs to another tenant.
        """
        lease = self._leases.get(session_id)
        if lease is None or lease.tenant != tenant.name:
            lease = await self.directory.find.remote(session_id, tenant.name)
        if lease is None:
            raise not_found("there is no such session, or it has ended: open a new one")
        return self._cache(lease)

    def _cache(self, lease: Lease) -> Lease:
        self._leases[lease.session_id] = lease
        self._leases.move_to_end(lease.session_id)
        if len(self._leases) > _MAX_CACHED_LEASES:
            self._leases.popitem(last=False)
        return lease

    async def ask(self, lease: Lease, method: str, *args: Any) -> Any:
        """Call a session; if its actor has died, call the actor that took its place."""
        try:
            try:
                return await lease.actor.ask.remote(lease.session_id, method, *args)
            except ActorDiedError:
                found = await self._recovered(lease)
                if found is None:
                    raise not_found("the session has ended: open a new one") from None
                lease = found
                if method in _NOT_AGAIN:
                    raise ServiceFailure(unavailable("the session's actor died: submit the trace again")) from None
                return await lease.actor.ask.remote(lease.session_id, method, *args)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ServiceFailure) and error.cause.failure.code == pb.ERROR_CODE_NOT_FOUND:
                self._leases.pop(lease.session_id, None)
            raise

    async def follow(
        self, lease: Lease, method: str, trace_id: str, follower: str, *args: Any, bundles: bool
    ) -> AsyncGenerator[Serialized, None]:
        """Yield the events of a session's streaming method.

        The session is told when the client goes.

        Args:
            bundles: whether the client reads bundles of events.
        """
        begun = ended = False
        try:
            for again in (True, False):
                try:
                    calls = self._following_of(lease.actor).stream((lease.session_id, method, *args))
                    async with contextlib.aclosing(calls) as following:
                        async for data in following:
                            begun = True
                            events = apart(data)
                            ended = kind_of(events[-1]) == "done"  # a client that goes now has everything
                            for event in (data,) if bundles else events:
                                yield Serialized(event)
                    break
                except ActorDiedError:
                    found = await self._recovered(lease)
                    if found is None:
                        message = (
                            "the session that ran the trace is gone, and with it what it held; run the trace again"
                        )
                        raise ServiceFailure(unavailable(message, trace_id)) from None
                    lease = found
                    if begun or not again or method in _NOT_AGAIN:
                        message = "the session's actor died; what had ended is still there: run the trace again"
                        raise ServiceFailure(unavailable(message, trace_id)) from None
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            if not ended:
                # The client is gone. This task is being cancelled, so nothing may be awaited.
                lease.actor.ask.remote(lease.session_id, "leave", trace_id, follower)

    async def place(self, lease: Lease, target: Target) -> tuple[str, ModelState]:
        """Return the replica that runs a session's traces, and the model's state.

        Both may be a second old. A replica that has gone meanwhile fails the trace, or Serve chooses another replica.
        """
        now = time.monotonic()
        key = (lease.session_id, target)
        known = self._replicas.get(key)
        if known is not None and now - known[2] < REPLICA_SECONDS:
            return known[0], known[1]
        replica, state = await self.directory.place.remote(lease.session_id, target)
        if len(self._replicas) > _MAX_CACHED_LEASES:
            self._replicas.clear()
        if replica and state.state == "RUNNING":
            self._replicas[key] = replica, state, now
        return replica, state

    def forget_place(self, lease: Lease, target: Target) -> None:
        """Ask the directory again for the replica of a session, because a trace has failed."""
        self._replicas.pop((lease.session_id, target), None)

    def _following_of(self, actor: ActorHandle) -> Grouped[tuple[Any, ...]]:
        """Return the calls by which the events of an actor's sessions are followed."""
        grouped = self._following.get(actor)
        if grouped is None:
            if len(self._following) > _MAX_ACTORS:
                self._following.clear()
            method = actor.follow_all.options(num_returns="streaming")

            async def follow_all(calls: list[tuple[Any, ...]]) -> AsyncGenerator[list[Item], None]:
                async for ref in method.remote(calls):
                    yield await ref

            grouped = self._following[actor] = Grouped(follow_all, _is_large)
        return grouped

    async def _recovered(self, lease: Lease) -> Lease | None:
        """Return the lease of a session whose actor has died, with the actor that took its place.

        None if the lease has ended.
        """
        self._leases.pop(lease.session_id, None)
        self._following.pop(lease.actor, None)
        found = await self.directory.recover.remote(lease.session_id, lease.tenant, lease.actor)
        return self._cache(found) if found is not None else None

    async def foreign(self, remotes: Remotes, lease: Lease, tenant: Tenant) -> dict[str, Saved]:
        """Return the saved values of the tenant's other sessions that a trace uses, by blob id."""
        found: dict[str, Saved] = {}
        for session_id in remotes.keys() - {"", lease.session_id}:
            try:
                held = await self.ask(await self.lease(session_id, tenant), "saved", list(remotes[session_id]))
            except (ServiceFailure, ray.exceptions.RayTaskError) as error:
                fact = describe(error)
                if fact.code != pb.ERROR_CODE_NOT_FOUND:
                    raise
                raise not_found(
                    f"a value of another session, {session_id[:80]!r}, is not here (any more): {fact.message}; send what "
                    "x.fetch() gives, or run the trace that saved it again"
                ) from None
            found.update(zip(remotes[session_id], held, strict=True))
        return found


def _is_large(call: tuple[Any, ...]) -> bool:
    """Whether a call brings a long trace, and shares no Ray call with others."""
    return any(isinstance(argument, TraceRequest) and argument.size > SMALL_BYTES for argument in call)
