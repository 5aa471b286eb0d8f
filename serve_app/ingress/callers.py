"""The callers of one proxy: their calls and connections, and whether a call may go on.

Everything is bounded for each tenant, so that no tenant fills what all tenants share. A call whose key is revoked or has expired
ends, also in the middle of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from serve_app.settings import GrpcSettings
from serve_app.tenants.book import Keyring
from serve_app.tenants.keys import Known, why_refused

# Seconds that a call waits for the first book of keys: a proxy has just started.
BOOK_SECONDS = 5.0
# Messages of one tenant that are received at a time. So few long messages of a tenant are held at a time.
RECEIVING_AT_A_TIME = 8
# Seconds for one message.
RECEIVING_SECONDS = 300.0
# Seconds after which a refused caller may try again.
RETRY_SECONDS = 1.0
# Seconds between two looks whether keys have expired.
LOOK_SECONDS = 2.0


@dataclass(eq=False)
class Call:
    """A call that runs.

    Attributes:
        known: the caller.
        task: the task of the call.
        ended: whether the call must end because its key does not hold any more.
        waiting: whether the task waits for the caller's message or for the service. While gRPC sends a reply, the task must not
            be cancelled: gRPC would then leave the call without an end.
    """

    known: Known
    task: asyncio.Task[object] = field(default_factory=lambda: _current())
    ended: bool = False
    waiting: bool = True

    def end(self) -> None:
        """End the call now, or after the reply that is being sent."""
        if not self.ended:
            self.ended = True
            if self.waiting:
                self.task.cancel()

    def sent(self) -> None:
        """Note that a reply was sent.

        Raises:
            ServiceFailure: UNAUTHENTICATED, the call must end.
        """
        self.waiting = True
        if self.ended:
            raise _over()


class Callers:
    """The calls of one proxy.

    Args:
        keys: the keys of all tenants.
        settings: the bounds.
        connected: returns the peers that are connected now; None where nothing tells, and connections are not bounded.

    Attributes:
        accepted: the connected peers with a call that was accepted.
    """

    def __init__(
        self, keys: Keyring, settings: GrpcSettings, connected: Callable[[], frozenset[str]] | None = None
    ) -> None:
        self._keys = keys
        self._settings = settings
        self._connected = connected
        self._calls: set[Call] = set()
        self._running: Counter[str] = Counter()
        self._receiving: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(RECEIVING_AT_A_TIME)
        )
        self._peers: defaultdict[str, set[str]] = defaultdict(set)
        self.accepted: set[str] = set()
        keys.when_changed(self.look)

    @contextlib.asynccontextmanager
    async def call(self, key: str | None, peer: str) -> AsyncIterator[Call]:
        """Let one call run.

        Args:
            key: the key of the call.
            peer: the other end of the connection, as gRPC names it.

        Raises:
            ServiceFailure: UNAVAILABLE, no keys are known yet; UNAUTHENTICATED, the key is not known, or ends while the call
                runs; QUOTA_EXCEEDED, the tenant has too many calls or the key too many connections.
        """
        if not self._keys.known and not await self._keys.until_known(BOOK_SECONDS):
            raise ServiceFailure(
                failure(pb.ERROR_CODE_UNAVAILABLE, "the service is starting: it does not know its keys yet")
            )
        known = self._keys.find(key)
        if known is None:
            raise ServiceFailure(failure(pb.ERROR_CODE_UNAUTHENTICATED, why_refused(key)))
        self._admit(known, peer)
        tenant = known.tenant.name
        call = Call(known)
        self._calls.add(call)
        self._running[tenant] += 1
        try:
            yield call
        except asyncio.CancelledError:
            if call.ended and call.waiting:
                call.task.uncancel()
                raise _over() from None
            raise
        else:
            if call.ended:  # Serve takes a cancelled call for one whose client has gone, and ends it without an error
                raise _over()
        finally:
            self._calls.discard(call)
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
                self._receiving.pop(tenant, None)

    @contextlib.asynccontextmanager
    async def receiving(self, call: Call) -> AsyncIterator[None]:
        """Receive the message of a call, in turn with the tenant's other calls.

        Raises:
            ServiceFailure: DEADLINE_EXCEEDED, the message took too long.
        """
        async with self._receiving[call.known.tenant.name]:
            try:
                async with asyncio.timeout(RECEIVING_SECONDS):
                    yield
            except TimeoutError:
                message = f"the message did not come within {RECEIVING_SECONDS:g} s"
                raise ServiceFailure(failure(pb.ERROR_CODE_DEADLINE_EXCEEDED, message)) from None

    def look(self) -> None:
        """End the calls whose keys do not hold any more."""
        for call in list(self._calls):
            if not self._keys.holds(call.known):
                call.end()

    async def watch(self) -> None:
        """Look again and again; keys expire without a change of the book."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def _admit(self, known: Known, peer: str) -> None:
        running, most = self._running[known.tenant.name], self._settings.calls_per_tenant
        if running >= most:
            message = f"{running} calls of {known.tenant.name} run already, which is the limit (grpc.calls_per_tenant)"
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=RETRY_SECONDS))
        self.accept(peer)
        if known.key is None or self._connected is None or not self._settings.connections_per_key:
            return
        peers, most = self._peers[known.key.hash], self._settings.connections_per_key
        if peer in peers:
            return
        if len(peers) >= most:
            self.forget(self._connected())
        if len(peers) >= most:
            message = (
                f"{len(peers)} connections use this key already, which is the limit (grpc.connections_per_key): close some, or "
                "share a connection"
            )
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=RETRY_SECONDS))
        peers.add(peer)

    def accept(self, peer: str) -> None:
        """Note that a call of a peer was accepted."""
        if self._connected is not None:
            self.accepted.add(peer)

    def forget(self, connected: frozenset[str]) -> None:
        """Forget the peers that are not connected any more."""
        self.accepted &= connected
        for key, peers in list(self._peers.items()):
            peers &= connected
            if not peers:
                del self._peers[key]


def _over() -> ServiceFailure:
    message = "the API key was revoked or has expired while the call ran"
    return ServiceFailure(failure(pb.ERROR_CODE_UNAUTHENTICATED, message))


def _current() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task
