"""Whose turn it is: tenants in turn, and the sessions of each tenant in turn, whatever the order in which they came."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Flow:
    """Whose a trace is.

    Attributes:
        share: of an engine's places and cache that the tenant may use at a time, from 0 to 1.
    """

    tenant: str = ""
    session: str = ""
    share: float = 1.0


NOBODY = Flow()


def in_turn(waiting: Iterable[T], flow_of: Callable[[T], Flow], running: Iterable[Flow]) -> list[T]:
    """Return what waits in the order in which it should start.

    The tenant of which the least runs is the first, and of its sessions the one of which the least runs.

    Args:
        waiting: in the order in which it came, which holds within a session.
        flow_of: whose each is.
        running: whose everything is that runs.
    """
    tenants: Counter[str] = Counter()
    sessions: Counter[tuple[str, str]] = Counter()
    for flow in running:
        tenants[flow.tenant] += 1
        sessions[flow.tenant, flow.session] += 1
    of_tenant: defaultdict[str, list[tuple[int, T]]] = defaultdict(list)
    for one in waiting:
        flow = flow_of(one)
        key = (flow.tenant, flow.session)
        of_tenant[flow.tenant].append((sessions[key], one))
        sessions[key] += 1
    turns: list[tuple[int, T]] = []
    for tenant, own in of_tenant.items():
        own.sort(key=lambda pair: pair[0])
        turns.extend((tenants[tenant] + number, one) for number, (_, one) in enumerate(own))
    turns.sort(key=lambda pair: pair[0])
    return [one for _, one in turns]
