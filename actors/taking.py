"""Which engine replicas take requests from this process, as Serve's routers in it know."""

from __future__ import annotations

from collections.abc import Iterable

from actors.protocol import Target

# The routers run on a thread of Serve's own; the values are replaced, never changed.
_taking: dict[Target, frozenset[str]] = {}


def note(target: Target, replicas: Iterable[str]) -> None:
    """Called by a router with the replicas of its deployment that take requests now."""
    _taking[target] = frozenset(replicas)


def taking(target: Target) -> frozenset[str] | None:
    """Return the replicas of a deployment that take requests; None before Serve has told."""
    return _taking.get(target)
