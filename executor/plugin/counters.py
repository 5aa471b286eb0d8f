"""What a worker has counted since its start, and what it holds, for operators."""

from __future__ import annotations

from typing import Any


def counters(runner: Any, sandboxes: Any) -> dict[str, float]:
    """Return a worker's counters and gauges by name.

    `actors.operations` has the metrics of these names.

    Args:
        runner: the worker's model runner.
        sandboxes: the worker's pool of sandboxed processes, None if it has none.
    """
    found: dict[str, float] = {}
    if sandboxes is not None:
        found |= sandboxes.numbers()
    graphs = getattr(runner, "graphs", None)
    if graphs is not None:
        found |= graphs.dispatcher.numbers()
    return found
