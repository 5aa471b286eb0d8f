"""What a session asks the account of its tenant: for its traces, and for its bytes.

A session asks only where its tenant has quotas.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from actors.protocol import Terms
from actors.quota_use import Cost, Demand
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb

# Bytes that running traces may log before the account hears of them.
GROWTH_BYTES = 1 << 20


class Store(Protocol):
    """What a session holds, as far as its dues depend on it (`actors.session_store`)."""

    session_id: str
    terms: Terms

    def stored_bytes(self) -> int:
        """Return the bytes of all values and uploads."""

    def no_room(self, size: int) -> pb.Failure | None:
        """Make room for more bytes; return a refusal if there is none."""

    def shed(self, size: int) -> bool:
        """Drop values that no client comes back for; return whether any were."""

    def frees_in(self) -> float:
        """Return the seconds until the first values expire."""


class Dues:
    """The calls of one session to the account; without quotas nothing is called.

    Args:
        directory: handle of the directory, which has the account.
        store: what the session holds.
    """

    def __init__(self, directory: Any, store: Store) -> None:
        self._directory = directory
        self._store = store
        self._turns: dict[str, asyncio.Event] = {}  # of the traces that owe, by key
        self._coming = 0  # bytes that have room and are not here yet
        self._reported = 0
        self._settling: set[asyncio.Future[None]] = set()

    @property
    def counted(self) -> bool:
        """Whether the tenant has quotas."""
        return self._store.terms.counted

    @property
    def owing(self) -> frozenset[str]:
        """Keys of the traces that have asked and have not settled."""
        return frozenset(self._turns)

    # Traces

    async def admit(self, key: str, tokens: int, size: int) -> None:
        """Ask for a trace of the session.

        Args:
            tokens: tokens that the trace may need.
            size: bytes of the trace, which the session holds already.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, the trace must not run.
        """
        turn = self._turns[key] = asyncio.Event()
        try:
            try:
                now = await self._admitted(key, tokens)
            except ServiceFailure as error:
                if error.failure.quota.name != "stored_bytes" or not self._store.shed(size):
                    raise
                now = await self._admitted(key, tokens)
        except ServiceFailure:
            self._turns.pop(key, None)
            raise
        if now:
            turn.set()

    async def _admitted(self, key: str, tokens: int) -> bool:
        stored = self._stored()
        with _causes():
            now: bool = await self._directory.admit.remote(self._store.session_id, key, Demand(tokens, stored))
        self._reported = stored
        return now

    async def wait(self, key: str) -> None:
        """Wait until an admitted trace may run."""
        await self._turns[key].wait()

    def turn(self, key: str) -> None:
        """Note that a trace may run; the account says so."""
        if key in self._turns:
            self._turns[key].set()

    def settle(self, key: str, tokens: int, saved: int) -> None:
        """Tell the account what a trace has cost, once.

        Args:
            tokens: tokens of the prompts, and generated tokens.
            saved: bytes saved that the account does not know yet.
        """
        if self._turns.pop(key, None) is None:
            return
        self._reported = self._stored()
        settled = self._directory.settle.remote(key, Cost(tokens, saved, self._reported))
        task = asyncio.ensure_future(_known(settled))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def settled(self) -> None:
        """Wait until the account knows the costs of all traces that have ended."""
        if self._settling:
            await asyncio.wait(set(self._settling))

    # Bytes

    @contextlib.asynccontextmanager
    async def room(self, size: int, *, saved: bool = False) -> AsyncIterator[None]:
        """Hold room for more bytes until they are here.

        Args:
            saved: whether a trace has saved them.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, the session or its tenant has no room.
        """
        self._coming += size
        try:
            if self.counted:
                await self._hold(size, size if saved else 0)
            refusal = self._store.no_room(size)
            if refusal is not None:
                raise ServiceFailure(refusal)
            yield
        finally:
            self._coming -= size

    async def grown(self) -> None:
        """Tell the account of bytes that have come by themselves, if there are many.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED.
        """
        if self.counted and self._stored() > self._reported + GROWTH_BYTES:
            await self._hold(0, 0)

    def restored(self) -> None:
        """Tell the account what the session holds, which has come from another actor."""
        if self.counted:
            self._report(self._stored())

    def shrunk(self) -> None:
        """Tell the account that the session may hold less."""
        if self.counted and (stored := self._stored()) < self._reported:
            self._report(stored)

    def _report(self, stored: int) -> None:
        self._reported = stored
        self._directory.hold.remote(self._store.session_id, stored, 0, self._store.frees_in())

    def _stored(self) -> int:
        return self._store.stored_bytes() + self._coming

    async def _hold(self, size: int, saved: int) -> None:
        """Ask for the bytes that the session holds; values that no client comes for go first."""
        try:
            await self._ask(saved)
        except ServiceFailure:
            if not self._store.shed(size):
                raise
            await self._ask(saved)

    async def _ask(self, saved: int) -> None:
        stored = self._stored()
        with _causes():
            await self._directory.hold.remote(self._store.session_id, stored, saved, self._store.frees_in())
        self._reported = stored


@contextlib.contextmanager
def _causes() -> Any:
    """Raise the account's own failure in place of Ray's error around it."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ServiceFailure):
            raise error.cause from None
        raise


async def _known(settled: Awaitable[None]) -> None:
    with contextlib.suppress(RayError):  # a directory that is dead counts nothing any more
        await settled
