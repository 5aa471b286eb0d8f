"""The tenants of a crowd: a lab, and strangers.

The lab's blocks run in the workers, and the strangers' blocks run in sandboxes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

from benchmarks.processes import zygotes

LAB, STRANGERS = "lab-key-of-a-crowd-1", "strangers-key-of-a-crowd-1"
TENANTS = (
    {"name": "lab", "api_key": LAB, "trust": "code", "operator": True},
    {"name": "strangers", "api_key": STRANGERS},
)
SHARE = 0.25


def keys(clients: int, share: float) -> list[str]:
    """Return a key for each client, the lab's first.

    Args:
        clients: how many there are.
        share: of the clients that are strangers.
    """
    strangers = min(clients - 1, round(clients * share))
    return [LAB] * (clients - strangers) + [STRANGERS] * strangers


def sandboxes(service: psutil.Process) -> int:
    """Return how many zygotes and processes of theirs a service has."""
    first, forked = zygotes(service.children(recursive=True))
    return len(first) + len(forked)


def left(service: psutil.Process, before: int, seconds: float) -> Sequence[str]:
    """Return what is left of sandboxes when no trace runs any more, if it does not go in time.

    Args:
        service: the service's process.
        before: how many processes there were when no trace had run yet; as many wait for the next traces.
        seconds: until they have gone.
    """
    deadline = time.monotonic() + seconds
    while (now := sandboxes(service)) > before:
        if time.monotonic() > deadline:
            return [f"zygotes and sandboxed processes: {now}, before {before}"]
        time.sleep(0.5)
    return []
