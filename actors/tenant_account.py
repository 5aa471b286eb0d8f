"""The account of one tenant: its traces, tokens and bytes against its quotas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from actors.allowance import Allowance
from actors.bucket import Bucket
from actors.quota_use import Cost, Demand, QuotaReached
from actors.shares import Shares
from interpose.v1 import trace_pb2 as pb

# The assumed duration of a trace before any trace of the tenant has ended.
_FIRST_SECONDS = 1.0
# The weight of the last trace's duration in the running mean.
_WEIGHT = 0.2
# Seconds until a session frees bytes, if it said nothing.
_UNKNOWN_SECONDS = 60.0


@dataclass(eq=False)
class Grant:
    """What one trace owes.

    Attributes:
        key: the trace.
        session_id: the session that runs the trace.
        tokens: tokens that were taken for the trace.
        began: when the trace's turn came; None while it waits.
        misses: looks at the session in a row that did not find the trace.
    """

    key: str
    session_id: str
    tokens: int
    began: float | None = None
    misses: int = 0

    @property
    def cost(self) -> int:
        """What the trace counts with in the turns."""
        return max(1, self.tokens)


@dataclass
class _Held:
    """The bytes of one session, and when it will drop values by itself, on the clock."""

    stored: int = 0
    frees_at: float = math.inf


@dataclass
class _Traces:
    """The traces of a tenant that owe, and the turns of its sessions."""

    turns: Shares = field(default_factory=Shares)
    running: dict[str, Grant] = field(default_factory=dict)
    waiting: dict[str, Grant] = field(default_factory=dict)


class TenantAccount:
    """What one tenant uses.

    Args:
        name: the tenant.
        allowance: its quotas.
        clock: returns seconds on a monotonic clock.

    Attributes:
        refused: calls refused so far, by quota.
    """

    def __init__(self, name: str, allowance: Allowance, clock: Callable[[], float]) -> None:
        self.refused: Counter[str] = Counter()
        self._name = name
        self._allowance = allowance
        self._clock = clock
        self._traces = _Traces()
        self._tokens = Bucket(allowance.tokens_per_minute, clock)
        self._saved = Bucket(allowance.saved_bytes_per_minute, clock)
        self._held: dict[str, _Held] = {}
        self._seconds = _FIRST_SECONDS  # the mean duration of a trace

    @property
    def running(self) -> int:
        """Traces that may run."""
        return len(self._traces.running)

    @property
    def waiting(self) -> int:
        """Traces that wait for the quota of running traces."""
        return len(self._traces.waiting)

    @property
    def stored(self) -> int:
        """Bytes of all sessions."""
        return sum(held.stored for held in self._held.values())

    def allow(self, allowance: Allowance) -> None:
        """Set the quotas from now on."""
        self._allowance = allowance
        self._tokens.limit(allowance.tokens_per_minute)
        self._saved.limit(allowance.saved_bytes_per_minute)

    def check(self, session_id: str, demand: Demand) -> None:
        """Refuse a trace for which a quota leaves no room.

        Raises:
            QuotaReached: with the first quota that is reached.
        """
        quotas = self._allowance
        if quotas.running_traces is not None and self.running >= quotas.running_traces:
            most = quotas.waiting_traces
            if most is not None and self.waiting >= most:
                wait = self._seconds / max(1, self.running)
                held = f"{self._name} has {self.running} traces running and {self.waiting} waiting"
                if most:
                    raise self._reached(f"{held}, the most that may wait", "waiting_traces", most, self.waiting, wait)
                limit = quotas.running_traces
                raise self._reached(f"{held}, the most that may run", "running_traces", limit, self.running, wait)
        if quotas.tokens_per_minute is not None:
            # A trace that may need more than the quota begins with all of it, and what it has used beyond is waited for later.
            needed = min(demand.tokens, quotas.tokens_per_minute)
            if self._tokens.left < needed:
                raise self._reached(
                    f"the trace may need {demand.tokens} tokens",
                    "tokens_per_minute",
                    quotas.tokens_per_minute,
                    self._tokens.used,
                    self._tokens.seconds_until(needed),
                )
        if quotas.saved_bytes_per_minute is not None and self._saved.left <= 0:
            raise self._reached(
                f"{self._name} has saved all bytes that it may",
                "saved_bytes_per_minute",
                quotas.saved_bytes_per_minute,
                self._saved.used,
                self._saved.seconds_until(1),
            )
        self._check_stored(session_id, demand.stored)

    def admit(self, session_id: str, key: str, demand: Demand) -> Grant:
        """Note a trace that has passed `check`; it waits until `begin` lets it run."""
        grant = self._traces.waiting[key] = Grant(key, session_id, demand.tokens)
        self._traces.turns.enter(session_id)
        self._tokens.take(demand.tokens)
        self._of(session_id).stored = demand.stored
        return grant

    def begin(self) -> list[Grant]:
        """Let waiting traces run as far as the quota allows, sessions in turn; return them."""
        begun: list[Grant] = []
        limit = self._allowance.running_traces
        while self._traces.waiting and (limit is None or self.running < limit):
            chosen = min(self._traces.waiting.values(), key=lambda one: self._traces.turns.had(one.session_id))
            del self._traces.waiting[chosen.key]
            self._traces.running[chosen.key] = chosen
            self._traces.turns.start(chosen.session_id, chosen.cost)
            chosen.began = self._clock()
            begun.append(chosen)
        return begun

    def settle(self, grant: Grant, cost: Cost) -> None:
        """End what a trace owes."""
        self._traces.waiting.pop(grant.key, None)
        if self._traces.running.pop(grant.key, None) is not None and grant.began is not None:
            self._seconds += _WEIGHT * (self._clock() - grant.began - self._seconds)
            self._traces.turns.end(grant.session_id, grant.cost, max(1, cost.tokens))
        self._traces.turns.leave(grant.session_id)
        self._tokens.take(cost.tokens - grant.tokens)
        self._saved.take(cost.saved)
        if cost.stored is not None:
            self._of(grant.session_id).stored = cost.stored

    def hold(self, session_id: str, stored: int, saved: int, frees_in: float) -> None:
        """Note the bytes of a session (see `Account.hold`)."""
        self._check_stored(session_id, stored)
        quota = self._allowance.saved_bytes_per_minute
        # A trace does not know before what it will save. So it may use the next minute's quota too, and others wait for that.
        if quota is not None and saved > self._saved.left + quota:
            raise self._reached(
                f"{self._name} saves {saved} bytes more",
                "saved_bytes_per_minute",
                quota,
                self._saved.used,
                self._saved.seconds_until(min(saved, quota)),
            )
        held = self._of(session_id)
        held.stored = stored
        held.frees_at = self._clock() + frees_in
        self._saved.take(saved)

    def forget(self, session_id: str) -> None:
        """Drop the bytes of a session that has ended."""
        self._held.pop(session_id, None)

    def uses(self, sessions: int) -> Iterator[pb.QuotaUse]:
        """Yield each quota that the tenant has, with its use."""
        quotas = self._allowance
        used = {
            "sessions": sessions,
            "running_traces": self.running,
            "waiting_traces": self.waiting,
            "tokens_per_minute": self._tokens.used,
            "stored_bytes": self.stored,
            "saved_bytes_per_minute": self._saved.used,
        }
        for name, amount in used.items():
            limit = getattr(quotas, name)
            if limit is not None:
                yield pb.QuotaUse(name=name, limit=limit, used=amount, refused=self.refused[name])

    def _check_stored(self, session_id: str, stored: int) -> None:
        quota = self._allowance.stored_bytes
        before = self._held.get(session_id, _Held()).stored
        if quota is None or stored <= before or self.stored - before + stored <= quota:
            return
        now = self._clock()
        frees = min((held.frees_at for held in self._held.values() if held.stored), default=math.inf)
        wait = max(1.0, frees - now) if math.isfinite(frees) else _UNKNOWN_SECONDS
        what = f"{stored - before} bytes more in a session; close sessions, forget jobs, or save less"
        raise self._reached(what, "stored_bytes", quota, self.stored, wait)

    def _of(self, session_id: str) -> _Held:
        return self._held.setdefault(session_id, _Held())

    def _reached(self, what: str, name: str, limit: float, used: float, wait: float) -> QuotaReached:
        self.refused[name] += 1
        return QuotaReached(what, name, limit, used, wait)
