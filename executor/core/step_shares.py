"""Divides the time of steps among tenants: a tenant that has had too much sits steps out.

Fair queueing over the time of steps. Each tenant has a clock, which goes on by the seconds of steps that the tenant has cost,
divided by its weight: the seconds that its blocks took, its part of the rows, and its part of what every step costs. A tenant
whose clock is ahead of another tenant's sits steps out until the other has caught up. So a tenant with little work does not wait
for a tenant with much.

A tenant that comes to others starts a little behind them, with a credit, if it had less before. A short trace is over before the
credit is used up. A tenant that has just had its share gets no credit again.

After Demers, Keshav and Shenker, "Analysis and Simulation of a Fair Queueing Algorithm" (1989). The credit is the one that
processes get which wake up in Linux's completely fair scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from executor.core.fairness import Flow

# Seconds of the engine that a tenant gets before others when it comes.
CREDIT_SECONDS = 0.5
# Seconds by which a tenant may be ahead: steps that all tenants share are cheaper than steps of each.
LEAD_SECONDS = 0.05
# How fast the known cost of a step without rows rises again, per step.
_RISES = 1.02
# Tenants that do nothing and are remembered before they are looked through.
_REMEMBERED = 1024


class StepShares:
    """The clocks of the tenants, in seconds for a weight of 1."""

    def __init__(self) -> None:
        self._clocks: dict[str, float] = {}
        self._weights: dict[str, float] = {}  # of the active tenants
        self._now = 0.0  # the clock of the active tenant that has had the least
        self._fixed = math.inf  # seconds of a step without rows and blocks

    def over(self, flows: Iterable[Flow]) -> frozenset[str]:
        """Return the tenants that have had more than their share.

        Args:
            flows: of all that runs or waits.
        """
        weights = {flow.tenant: flow.weight for flow in flows}
        clocks = self._clocks
        still = weights.keys() & self._weights.keys()
        self._now = max(self._now, min((clocks[tenant] for tenant in still), default=0.0))
        for tenant in weights.keys() - still:
            credit = CREDIT_SECONDS / weights[tenant] if still else 0.0
            clocks[tenant] = max(clocks.get(tenant, -math.inf), self._now - credit)
        self._weights = weights
        self._forget()
        least = min((clocks[tenant] for tenant in weights), default=0.0)
        return frozenset(
            tenant for tenant, weight in weights.items() if (clocks[tenant] - least) * weight > LEAD_SECONDS
        )

    def charge(self, rows: Mapping[str, int], seconds: float, spent: Mapping[str, float]) -> None:
        """Let the tenants' clocks go on by what a step has cost.

        Args:
            rows: the rows of each tenant in the step.
            seconds: the time since the end of the step before.
            spent: the seconds of these that each tenant's blocks took. Blocks of tenants without rows may have ended meanwhile.
        """
        rest = max(0.0, seconds - sum(spent.values()))
        self._fixed = min(rest, self._fixed * _RISES)
        weights = sum(self._weights.get(tenant, 1.0) for tenant in rows)
        each = (rest - self._fixed) / max(1, sum(rows.values()))
        for tenant in {*rows, *spent}:
            own = each * rows.get(tenant, 0) + spent.get(tenant, 0.0)
            shared = self._fixed / weights if tenant in rows else 0.0  # a part by weight, divided by the weight
            self._clocks[tenant] = self._clocks.get(tenant, self._now) + shared + own / self._weights.get(tenant, 1.0)

    def _forget(self) -> None:
        """Forget tenants that would get the whole credit again."""
        if len(self._clocks) > _REMEMBERED + 2 * len(self._weights):
            self._clocks = {
                tenant: clock
                for tenant, clock in self._clocks.items()
                if tenant in self._weights or clock > self._now - CREDIT_SECONDS
            }
