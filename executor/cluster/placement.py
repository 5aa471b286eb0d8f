"""Finds Ray and the placement group for an engine's workers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from executor.cluster.start_failure import CannotStart, of_workers

WAIT_SECONDS = 600.0
# After the first worker has failed; a worker that waited for it may be heard of before the one that caused it.
OTHERS_SECONDS = 3.0


def connect() -> None:
    """Connect this process to Ray.

    The order is: the running Ray of this process, the cluster of `RAY_ADDRESS`, a new local Ray.

    Raises:
        ValueError: RAY_ADDRESS is a ray:// address. Such a client has no local object store and cannot place workers that
            share memory with this process; join the cluster as a node and use host:port.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS={address} is a Ray client address, through which workers cannot be placed: start a node here "
            "with `ray start --address=HOST:6379 --num-cpus=0` and set RAY_ADDRESS=HOST:6379"
        )
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        try:
            ray.init(include_dashboard=False, log_to_driver=False)
        except Exception:
            # Ray gives its node 30 seconds to come up, which a busy machine may not keep to.
            ray.shutdown()
            ray.init(include_dashboard=False, log_to_driver=False)


def placement_group_for(config: Any, device_key: str) -> PlacementGroup:
    """Return the placement group for an engine's workers.

    The group that the engine's process was placed in (a Serve replica's) is used, never nested; otherwise one is made, with
    one bundle for each worker, placed as the model's settings say.

    Args:
        config: vLLM's VllmConfig.
        device_key: the resource of one worker's device, e.g. "GPU"; "CPU" on CPUs.

    Raises:
        RuntimeError: the cluster has no room for it.
    """
    parallel = config.parallel_config
    group = parallel.placement_group or ray.util.get_current_placement_group()
    if group is None:
        strategy = config.additional_config.get("interpose", {}).get("placement", "PACK")
        group = ray.util.placement_group([{device_key: 1.0}] * parallel.world_size, strategy=strategy)
        parallel.placement_group = group
    if not group.wait(WAIT_SECONDS):
        strategy = placement_group_table(group)["strategy"]
        raise RuntimeError(
            f"the cluster has no room for {parallel.world_size} workers with one {device_key} each, placed {strategy}: "
            f"{ray.cluster_resources()}"
        )
    return group


def worker_bundles(group: PlacementGroup, world_size: int, device_key: str, first_node: str) -> list[tuple[int, str]]:
    """Choose a bundle for each rank: bundle index and node id.

    Ranks of one node are next to each other.

    Args:
        group: the placement group.
        world_size: how many workers.
        device_key: bundles without one whole device are not workers' (a Serve replica's own first bundle, say).
        first_node: the engine's node; its bundles come first, so that rank 0 is near.
    """
    table = placement_group_table(group)
    bundles: dict[int, dict[str, float]] = table["bundles"]
    nodes: dict[int, str] = table["bundles_to_node_id"]
    usable: Sequence[int] = sorted(
        (index for index, resources in bundles.items() if resources.get(device_key, 0) >= 1),
        key=lambda index: (nodes[index] != first_node, nodes[index], index),
    )
    if len(usable) < world_size:
        raise RuntimeError(
            f"the placement group has {len(usable)} bundles with a {device_key}, the engine needs {world_size} for its workers"
        )
    return [(index, nodes[index]) for index in usable[:world_size]]


def wait_ready(refs: list[Any], what: str) -> list[Any]:
    """Return the results of `refs`, one of each rank; fail as soon as one of them does.

    Raises:
        CannotStart: a worker died or raised, with its own words; or some are not ready in time.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    waiting = list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError(f"{what} took longer than {WAIT_SECONDS:g} s")
        if _error(done[0]) is not None:
            ended = set(ray.wait(refs, num_returns=len(refs), timeout=OTHERS_SECONDS)[0])
            errors = {rank: error for rank, ref in enumerate(refs) if ref in ended and (error := _error(ref))}
            raise CannotStart(of_workers(errors, what))
    return ray.get(refs)


def _error(ref: Any) -> Exception | None:
    """Return what a call that has ended failed with."""
    try:
        ray.get(ref)
    except Exception as error:
        return error
    return None
