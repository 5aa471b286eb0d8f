"""Chooses the session that gives way to a new session when there is no room.

If no session gives way, the client gets an error that says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.allowance import Allowances
from actors.protocol import Lease, SessionStats
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb

# A collected session gives way after this time. Its client opens another session, without noticing, when it runs the next
# trace. The time is long enough between opening a session and submitting: clients do not take each other's place for ever.
COLLECTED_SECONDS = 2.0
# A session with unfetched values gives way after this time: its client may be about to fetch them. A killed client does not
# close its session.
FORGOTTEN_SECONDS = 60.0


@dataclass(frozen=True)
class Limit:
    """A limit that is reached.

    Attributes:
        what: the limit in words.
        setting: the name of the setting.
        most: the limit.
        used: sessions that count towards it.
        leases: the sessions of which one would have to give way.
    """

    what: str
    setting: str
    most: int
    used: int
    leases: tuple[Lease, ...]


def reached(
    tenant: str, leases: Iterable[Lease], opening: Mapping[str, int], settings: Any, allowances: Allowances
) -> Limit | None:
    """Return the limit that leaves no room for one more session of a tenant.

    None if there is room. Sessions that are reserved for other tenants are no room.

    Args:
        leases: all leases.
        opening: sessions that are being opened, by tenant.
        settings: a `SessionSettings`.
        allowances: the quotas of all tenants.
    """
    everybody = tuple(leases)
    held = Counter(lease.tenant for lease in everybody)
    held.update(opening)
    quota = allowances.of(tenant).sessions
    most = settings.max_per_tenant if quota is None else quota
    if held[tenant] >= most:
        setting = "sessions.max_per_tenant" if quota is None else "quotas.sessions"
        own = tuple(lease for lease in everybody if lease.tenant == tenant)
        what = f"{tenant} has {held[tenant]} sessions open, the most a tenant may have"
        return Limit(what, setting, most, held[tenant], own)
    reserved = sum(
        max(0, own.reserved_sessions - held[name]) for name, own in allowances.tenants.items() if name != tenant
    )
    taken = held.total()
    if taken + reserved < settings.max_sessions:
        return None
    what = f"all {settings.max_sessions} sessions of the service are taken"
    if reserved:
        what += f" or reserved for other tenants ({reserved})"
    # A session within another tenant's reserve would leave its room to that tenant again.
    able = tuple(
        lease
        for lease in everybody
        if lease.tenant == tenant or held[lease.tenant] > allowances.of(lease.tenant).reserved_sessions
    )
    return Limit(what, "sessions.max_sessions", settings.max_sessions, taken, able)


def chosen(leases: Iterable[Lease], stats: Mapping[str, SessionStats]) -> Lease | None:
    """Return the session that gives way: the longest idle session among the sessions that may."""
    idle = [(stats[lease.session_id], lease) for lease in leases if lease.session_id in stats]
    able = [(one.idle_seconds, lease) for one, lease in idle if one.idle_seconds >= _patience(one)]
    return max(able, key=lambda pair: pair[0])[1] if able else None


def seconds_until(leases: Iterable[Lease], stats: Mapping[str, SessionStats]) -> float:
    """Return the seconds until the first of some sessions may give way.

    The sessions are assumed to stay unused.
    """
    left = [
        _patience(stats[lease.session_id]) - stats[lease.session_id].idle_seconds
        for lease in leases
        if lease.session_id in stats
    ]
    return max(COLLECTED_SECONDS, min(left, default=FORGOTTEN_SECONDS))


def refusal(limit: Limit, waited: float, retention: float, retry_after: float) -> ServiceFailure:
    """Return the error of a session that cannot be opened.

    Args:
        limit: the limit that is reached.
        waited: seconds that the client has waited already.
        retention: seconds that results are kept.
        retry_after: seconds after which a session may have given way.
    """
    message = (
        f"{limit.what}, and none of them gave way within {waited:g} s: close one, or try again. A session gives way when its "
        f"client has fetched all its values, or when it was not used for {FORGOTTEN_SECONDS:g} s. A session that "
        f"keeps results of jobs, or was opened to be kept, stays for {retention:g} s. The service's setting {limit.setting} "
        "allows more"
    )
    use = pb.QuotaUse(name=limit.setting.rpartition(".")[2], limit=limit.most, used=limit.used)
    return ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=retry_after, quota=use))


def _patience(stats: SessionStats) -> float:
    if math.isinf(stats.idle_seconds):
        return 0.0
    return COLLECTED_SECONDS if stats.collected else FORGOTTEN_SECONDS
