"""The engine replicas that take requests from this process, as Serve's routers know them."""

from __future__ import annotations

from collections.abc import Iterable

from actors.protocol import Target

# Serve's routers run on another thread. So values are replaced, never changed.
_taking: dict[Target, frozenset[str]] = {}


def note(target: Target, replicas: Iterable[str]) -> None:
    """Store the replicas of a deployment that take requests now; a router calls this."""
    _taking[target] = frozenset(replicas)


def taking(target: Target) -> frozenset[str] | None:
    """Return the replicas of a deployment that take requests; None before Serve has told."""
    return _taking.get(target)
