"""The account of what the tenants use: the one place that admits traces and bytes.

The account lies with the directory. Sessions ask it, whatever ingress replica a call came through, and each question is
answered in one go on the directory's event loop. So a quota is exact.

A trace owes what it was admitted with until its session settles. What a session owes ends with the session's lease, what it
owes for traces ends with its actor, and a trace that its session no longer knows is settled by `reconcile`. So nothing is
owed for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from actors.allowance import Allowances
from actors.quota_use import Cost, Demand, QuotaReached
from actors.tenant_account import Grant, TenantAccount
from interpose.v1 import trace_pb2 as pb

logger = logging.getLogger(__name__)

# Looks at a session in a row that must miss a trace before the trace is settled: it may have been admitted during a look.
_MISSES = 2

# Tells a session that one of its traces may run: the session's id and the trace's key.
Turn = Callable[[str, str], None]


@dataclass(frozen=True)
class TenantUse:
    """What a tenant uses of its quotas.

    Attributes:
        running: traces that engines have.
        waiting: traces that wait for the tenant's quota of running traces.
        quotas: each quota that the tenant has, with its use.
        refused: calls refused since the directory began, by quota.
    """

    running: int
    waiting: int
    quotas: tuple[pb.QuotaUse, ...]
    refused: Mapping[str, int]


class Account:
    """The account of all tenants; every method is atomic on the directory's event loop.

    Args:
        turn: called for each trace that waited and may run now.
        clock: returns seconds on a monotonic clock.
    """

    def __init__(self, turn: Turn, clock: Callable[[], float] = time.monotonic) -> None:
        self._turn = turn
        self._clock = clock
        self._allowances = Allowances()
        self._tenants: dict[str, TenantAccount] = {}
        self._grants: dict[str, tuple[str, Grant]] = {}  # tenant and grant, by the trace's key

    @property
    def allowances(self) -> Allowances:
        """The quotas that hold now."""
        return self._allowances

    @allowances.setter
    def allowances(self, allowances: Allowances) -> None:
        self._allowances = allowances
        for name, tenant in self._tenants.items():
            tenant.allow(allowances.of(name))
            self._begin(tenant)

    # What sessions ask

    def admit(self, tenant: str, session_id: str, key: str, demand: Demand) -> bool:
        """Admit a trace; return whether it may run now.

        If it may not, its session is told when it may.

        Raises:
            QuotaReached: the tenant has reached a quota, and nothing was admitted.
        """
        own = self._of(tenant)
        own.check(session_id, demand)
        grant = own.admit(session_id, key, demand)
        self._grants[key] = (tenant, grant)
        self._begin(own, quiet=key)
        return grant.began is not None

    def settle(self, key: str, cost: Cost) -> None:
        """End what a trace owes, and give back what it has not used.

        Idempotent.
        """
        name, grant = self._grants.pop(key, ("", None))
        if grant is not None:
            tenant = self._tenants[name]
            tenant.settle(grant, cost)
            self._begin(tenant)

    def hold(self, tenant: str, session_id: str, stored: int, saved: int, frees_in: float) -> None:
        """Note the bytes that a session holds, or is about to hold.

        Args:
            stored: all bytes of the session. Less than before is always taken.
            saved: bytes of these that a trace has just saved.
            frees_in: seconds until the session drops values by itself.

        Raises:
            QuotaReached: the tenant has reached a quota, and nothing was noted.
        """
        self._of(tenant).hold(session_id, stored, saved, frees_in)

    # What the directory knows

    def gone(self, tenant: str, session_id: str) -> None:
        """End all that a session owes, because its lease has ended."""
        own = self._tenants.get(tenant)
        if own is not None:
            self.lost(session_id)
            own.forget(session_id)

    def lost(self, session_id: str) -> None:
        """End what a session owes for traces, because its actor is dead."""
        for key in [key for key, (_, grant) in self._grants.items() if grant.session_id == session_id]:
            self.settle(key, Cost())

    def reconcile(self, owing: Mapping[str, Collection[str]], sessions: Collection[str]) -> None:
        """Settle traces that their sessions no longer know.

        Args:
            owing: keys of the traces that have not settled, of each session that answered.
            sessions: ids of all sessions that have a lease.
        """
        for key, (_, grant) in list(self._grants.items()):
            session_id = grant.session_id
            if key in owing.get(session_id, ()) or (session_id in sessions and session_id not in owing):
                grant.misses = 0
                continue
            grant.misses += 1
            if grant.misses >= _MISSES:
                logger.warning("a trace of session %s had not settled: its quota is given back", session_id)
                self.settle(key, Cost())

    def refused(self, tenant: str, quota: str) -> None:
        """Count a call that was refused for a quota that is counted elsewhere."""
        self._of(tenant).refused[quota] += 1

    def usage(self, tenant: str, sessions: int = 0) -> TenantUse:
        """Return what a tenant uses.

        Args:
            sessions: sessions that the tenant has open.
        """
        own = self._of(tenant)
        return TenantUse(own.running, own.waiting, tuple(own.uses(sessions)), dict(own.refused))

    @property
    def known(self) -> Iterator[str]:
        """The tenants that have used anything."""
        return iter(tuple(self._tenants))

    def _of(self, tenant: str) -> TenantAccount:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = TenantAccount(tenant, self._allowances.of(tenant), self._clock)
        return found

    def _begin(self, tenant: TenantAccount, quiet: str = "") -> None:
        """Let waiting traces run as far as the quota allows, and tell their sessions.

        Args:
            quiet: a trace whose session knows already.
        """
        for grant in tenant.begin():
            if grant.key != quiet:
                self._turn(grant.session_id, grant.key)


__all__ = ["Account", "QuotaReached", "TenantUse"]
