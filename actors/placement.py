"""Makes the service's own actors on the cluster's head node.

The service cannot run without the head. So a lost node of workers takes no session with it, nor the results that the
directory owns.
"""

from __future__ import annotations

import functools
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_HEAD = "node:__internal_head__"


def on_the_head() -> Any:
    """Return the scheduling strategy of an actor that lives on the head.

    The actor is never in the placement group of the engine replica that happens to ask first. The strategy is not a preference:
    Ray would put the actor elsewhere on a cluster whose head has no CPUs, though the actor asks for none.
    """
    for node in ray.nodes():
        if node["Alive"] and _HEAD in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return "DEFAULT"


@functools.cache
def remote(code: Any) -> Any:
    """Apply `ray.remote` once for each class or function.

    What `ray.remote` returns has another name every time. Ray's control service keeps each name for good, and so does every
    process that hears of such an actor.
    """
    return ray.remote(code)
