"""The seconds of a worker's time that tenants' blocks take, for the scheduler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from executor.block.mediator import Mediator


class Spent:
    """What blocks took that the scheduler does not know of yet.

    Nothing is counted while all traces are of one tenant: the tenant shares the engine with nobody.

    Args:
        mediators: the mediators that are here, by key.
        tenant_of: returns the tenant of a trace, "" if the trace is not here.
    """

    def __init__(self, mediators: Mapping[str, Mediator], tenant_of: Callable[[str], str]) -> None:
        self._mediators = mediators
        self._tenant_of = tenant_of
        self._first: str | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._several = False
        self._due = False

    def came(self, tenant: str) -> None:
        """Note that a trace of a tenant came."""
        if self._first is None:
            self._first = tenant
        self._several = self._several or tenant != self._first

    def ran(self) -> None:
        """Note that blocks ran in a step."""
        self._due = self._several

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """Count the time of something that a tenant's trace causes outside of steps."""
        began = monotonic()
        try:
            yield
        finally:
            if self._several:
                self._seconds[tenant] += monotonic() - began
                self._due = True

    def take(self) -> dict[str, float]:
        """Return the seconds that each tenant's blocks took since the last call."""
        if not self._due:
            return {}
        self._due = False
        seconds = self._seconds
        self._seconds = defaultdict(float)
        for mediator in self._mediators.values():
            progress, identity = mediator.state.progress, mediator.identity
            new = progress.before + progress.used - progress.charged
            if new <= 0:
                continue
            progress.charged += new
            owner = self._mediators.get(identity.owner) if identity.owner else mediator
            if owner is not None:
                seconds[self._tenant_of(owner.identity.trace_id)] += new
        return dict(seconds)
