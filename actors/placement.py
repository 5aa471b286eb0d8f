"""How and where the service's own actors are made: on the cluster's head, which it cannot do without anyway.

A node of workers that is lost then takes no session with it, nor the results that the directory owns.
"""

from __future__ import annotations

import functools
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_HEAD = "node:__internal_head__"


def on_the_head() -> Any:
    """Return the scheduling strategy of an actor that lives on the head, wherever it is asked for.

    It is never in the placement group of the engine replica that may happen to be the first to ask. Nor is it a preference:
    Ray would put the actor elsewhere on a cluster whose head has no CPUs, though it asks for none.
    """
    for node in ray.nodes():
        if node["Alive"] and _HEAD in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return "DEFAULT"


@functools.cache
def remote(code: Any) -> Any:
    """`ray.remote`, once for each: what it returns has another name every time.

    Ray's control service keeps each of them for good, and so does every process that hears of an actor, after asking for it.
    """
    return ray.remote(code)
