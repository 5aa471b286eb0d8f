"""The order in which waiting requests start: tenants take turns, and so do their sessions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Flow:
    """The tenant and the session that a trace belongs to.

    Attributes:
        share: the part of an engine's places and cache that the tenant may use at a time, from 0 to 1.
    """

    tenant: str = ""
    session: str = ""
    share: float = 1.0


NOBODY = Flow()


def in_turn(waiting: Iterable[T], flow_of: Callable[[T], Flow], running: Iterable[Flow]) -> list[T]:
    """Return the waiting items in the order in which they should start.

    The tenant with the fewest running items comes first. Among its sessions, the session with the fewest running items comes
    first.

    Args:
        waiting: the waiting items in order of arrival. Items of one session keep this order.
        flow_of: returns the flow of an item.
        running: the flow of every running item.
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
