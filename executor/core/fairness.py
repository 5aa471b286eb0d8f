"""The order in which waiting requests start: tenants take turns, and so do their sessions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Flow:
    """The tenant and the session that a trace belongs to.

    Attributes:
        share: the part of an engine's places and cache that the tenant may use at a time, from 0 to 1.
        weight: the part of an engine that the tenant gets beside other tenants, against their weights.
    """

    tenant: str = ""
    session: str = ""
    share: float = 1.0
    weight: float = 1.0


NOBODY = Flow()


def in_turn(
    waiting: Iterable[T],
    flow_of: Callable[[T], Flow],
    running: Iterable[Flow],
    part_of: Callable[[T], float] | None = None,
    held: Mapping[str, float] | None = None,
) -> list[T]:
    """Return the waiting items in the order in which they should start.

    The tenant that holds the least for its weight comes first. Among its sessions, the session with the fewest running items
    comes first.

    Args:
        waiting: the waiting items in order of arrival. Items of one session keep this order.
        flow_of: returns the flow of an item.
        running: the flow of every running item.
        part_of: returns how much of the engine an item holds when it runs; 1 unless given.
        held: how much of the engine each tenant holds now; the number of its running items unless given.
    """
    tenants: Counter[str] = Counter()
    sessions: Counter[tuple[str, str]] = Counter()
    for flow in running:
        tenants[flow.tenant] += 1
        sessions[flow.tenant, flow.session] += 1
    of_tenant: defaultdict[str, list[tuple[int, T]]] = defaultdict(list)
    weights: dict[str, float] = {}
    for one in waiting:
        flow = flow_of(one)
        key = (flow.tenant, flow.session)
        of_tenant[flow.tenant].append((sessions[key], one))
        weights[flow.tenant] = flow.weight
        sessions[key] += 1
    turns: list[tuple[float, T]] = []
    for tenant, own in of_tenant.items():
        own.sort(key=lambda pair: pair[0])
        holds = float(tenants[tenant]) if held is None else held.get(tenant, 0.0)
        for _, one in own:
            turns.append((holds / weights[tenant], one))
            holds += 1.0 if part_of is None else part_of(one)
    turns.sort(key=lambda pair: pair[0])
    return [one for _, one in turns]


def parts_of(flows: Iterable[Flow]) -> dict[str, float]:
    """Return each tenant's weight as a part of all tenants' weights.

    Args:
        flows: of everything that waits or runs.
    """
    weights = {flow.tenant: flow.weight for flow in flows}
    total = sum(weights.values())
    return {tenant: weight / total for tenant, weight in weights.items()}
