"""The lazy Ray executor: places vLLM's workers on the cluster's nodes, on GPUs and on CPUs.

It is vLLM's RayExecutorV2 with a start of its own. It finds Ray, chooses the placement group, and its actors import nothing
heavy before they are up (`executor.cluster.actor`). It also has its own way to notice that a worker is gone
(`executor.cluster.liveness`). The message queues and the shutdown are inherited.
"""

from __future__ import annotations

import collections
import os
import threading
import time
import weakref
from collections import defaultdict
from typing import Any

import cloudpickle
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import FutureWrapper
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerHandle
from vllm.v1.executor.ray_utils import build_actor_name

from executor.cluster.actor import LazyWorkerActor
from executor.cluster.environment import forwarded
from executor.cluster.liveness import Lifeline, exit_with_parent
from executor.cluster.placement import connect, placement_group_for, wait_ready, worker_bundles
from executor.cluster.shared_memory import forget_names
from executor.cluster.spinning import spin_briefly
from executor.cluster.start_failure import leave_note
from executor.cluster.verdicts import report
from executor.core.startup import Startup

logger = init_logger(__name__)

POLL_SECONDS = 0.5


class LazyRayExecutor(RayExecutorV2):
    """Executes vLLM's steps on Ray actors."""

    def _init_executor(self) -> None:
        leave_note()
        self._finalizer = weakref.finalize(self, self.shutdown)
        self.is_failed = False
        self.failure_callback = None
        self.shutting_down = False
        self.shutdown_lock = threading.Lock()
        self.ray_worker_handles: list[RayWorkerHandle] = []
        self.response_mqs: list[Any] = []
        began = time.monotonic()

        exit_with_parent()
        connect()
        sizes = self._get_parallel_sizes()  # also sets self.world_size
        device_key = current_platform.ray_device_key
        group = placement_group_for(self.vllm_config, device_key or "CPU")
        here = ray.get_runtime_context().get_node_id()
        bundles = worker_bundles(group, self.world_size, device_key or "CPU", here)
        self._lifeline = Lifeline(ray.util.get_node_ip_address(), self.world_size)
        self._start_actors(group, bundles, here, sizes)
        placed = wait_ready(
            [handle.actor.place.remote(device_key) for handle in self.ray_worker_handles], "starting the worker actors"
        )
        logger.info("%d worker actors are up after %.1f s", len(placed), time.monotonic() - began)
        # All workers import vLLM at the same time. Otherwise all would wait while a single worker imports it.
        environment = forwarded()
        prepared = [
            handle.actor.prepare.remote(
                environment, self._lifeline.ticket, Startup.of_worker(handle.rank), self._files()
            )
            for handle in self.ray_worker_handles
        ]
        wait_ready(prepared, "importing vLLM in the workers")
        self._initialize_workers(placed, here)
        logger.info("workers are initialized after %.1f s", time.monotonic() - began)
        self._connect_queues()
        self.futures_queue: collections.deque[FutureWrapper] = collections.deque()
        self._post_init_executor()
        self.start_worker_monitor()
        self.output_rank = self._get_output_rank()

    def _start_actors(self, group: Any, bundles: list[tuple[int, str]], here: str, sizes: tuple[int, int, int]) -> None:
        """Create one lazy actor in each rank's bundle, and the queue that steps are broadcast on."""
        self.rpc_broadcast_mq = MessageQueue(
            self.world_size,
            sum(node == here for _, node in bundles),
            max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * 1024 * 1024,
            connect_ip=ray.util.get_node_ip_address(),
        )
        actor_class = ray.remote(LazyWorkerActor)
        for rank, (bundle, node) in enumerate(bundles):
            options = {
                "name": build_actor_name(self.vllm_config.instance_id, rank, *sizes),
                "num_cpus": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                ),
                "runtime_env": self._build_runtime_env(),
                **self._get_actor_resource_kwargs(),
            }
            actor = actor_class.options(**options).remote(rank)
            self.ray_worker_handles.append(
                RayWorkerHandle(actor=actor, rank=rank, local_rank=-1, node_id=node, bundle_id_idx=bundle)
            )

    def _files(self) -> tuple[str, str]:
        """Return what each worker checks on its own node first.

        That is the model's folder ("" for none) and its format.
        """
        model = str(self.vllm_config.model_config.model)
        return model if os.path.isdir(model) else "", str(self.vllm_config.load_config.load_format)

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # On CPUs a worker takes its bundle's CPUs by being in it; asking for a device would name a resource that no node has.
        return RayExecutorV2._get_actor_resource_kwargs() if current_platform.ray_device_key else {}

    def _initialize_workers(self, placed: list[tuple[str, list[str]]], here: str) -> None:
        """Give every worker its rank on the node, its devices and its configuration.

        The workers then load the model.
        """
        ranks_on: dict[str, list[int]] = defaultdict(list)
        devices_on: dict[str, list[Any]] = defaultdict(list)
        for rank, (node, ids) in enumerate(placed):
            ranks_on[node].append(rank)
            devices_on[node].extend(current_platform.device_control_id_to_physical_device_id(one) for one in ids)
        queue = self.rpc_broadcast_mq.export_handle()
        method = ray.get(self.ray_worker_handles[0].actor.create_dist_init_method.remote(self.world_size))
        started = []
        for rank, (node, _) in enumerate(placed):
            handle = self.ray_worker_handles[rank]
            handle.local_rank = ranks_on[node].index(rank)
            # On CPUs vLLM takes ranks that were told the same for neighbours, and has them meet in shared memory.
            meeting = method if len(ranks_on) == 1 else f"{method}?node={node}"
            kwargs = {
                "vllm_config": self.vllm_config,
                "rank": rank,
                "input_shm_handle": queue,
                "is_driver_worker": self._is_driver_worker(rank),
                "is_driver_node": node == here,
            }
            started.append(
                handle.actor.initialize.remote(
                    cloudpickle.dumps(kwargs),
                    local_rank=handle.local_rank,
                    env_vars={},
                    distributed_init_method=meeting,
                    assigned_physical_gpu_ids=sorted(devices_on[node]) or None,
                )
            )
        if len(devices_on) == 1 and current_platform.ray_device_key:
            # The mapping is one node's; with several the driver has none of its own.
            self.parallel_config.assigned_physical_gpu_ids = sorted(next(iter(devices_on.values())))
        wait_ready(started, "loading the model in the workers")
        self._lifeline.accept()

    def _connect_queues(self) -> None:
        """Open the queues that workers answer on, then let the workers run."""
        for result in ray.get([handle.actor.wait_for_init.remote() for handle in self.ray_worker_handles]):
            answers = MessageQueue.create_from_handle(result["handle"], 0)
            spin_briefly([answers])
            self.response_mqs.append(Answers(answers))
        # The workers subscribe inside run(), so it must have begun before anyone waits for a subscription.
        for handle in self.ray_worker_handles:
            handle.run()
        self.rpc_broadcast_mq.wait_until_ready()
        for response_queue in self.response_mqs:
            response_queue.wait_until_ready()
        forget_names([self.rpc_broadcast_mq])

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watch the workers from a thread of its own.

        A worker is lost when its lifeline ends, or when Ray says that its actor has ended.
        """
        ranks = {handle.run_ref: handle.rank for handle in self.ray_worker_handles}
        self._monitor_thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._lifeline, ranks), daemon=True, name="interpose-watch"
        )
        self._monitor_thread.start()

    def workers_died(self, ranks: list[int]) -> None:
        """End the rest of an engine that cannot go on, and tell the callers that wait for a step."""
        self.is_failed = True
        logger.error("the workers of ranks %s are gone: the engine ends", ranks)
        self.shutdown()
        callback, self.failure_callback = self.failure_callback, None
        if callback is not None:
            callback()

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        super().shutdown()
        if hasattr(self, "_lifeline"):
            self._lifeline.close()


class Answers:
    """The queue on which one worker answers.

    When the executor shuts down, a thread that waits at the queue is woken. vLLM's own wakes a reader on the worker's node
    only.
    """

    def __init__(self, inner: MessageQueue) -> None:
        self._inner = inner
        self._ended = False

    def wait_until_ready(self) -> None:
        self._inner.wait_until_ready()

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next answer.

        Raises:
            TimeoutError: none came in `timeout` seconds.
            RuntimeError: none will come.
        """
        if self._inner._is_local_reader:
            return self._inner.dequeue(timeout, indefinite)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
            try:
                return self._inner.dequeue(max(0.0, left))
            except TimeoutError:
                if self._ended:
                    raise RuntimeError("the engine has ended") from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def shutdown(self) -> None:
        self._ended = True
        self._inner.shutdown()


def _watch(owner: weakref.ref[LazyRayExecutor], lifeline: Lifeline, ranks: dict[Any, int]) -> None:
    while True:
        dead = lifeline.lost(POLL_SECONDS)
        report(lifeline.overdue)
        executor = owner()
        if executor is None or executor.shutting_down or not ray.is_initialized():
            return
        if not dead:
            # Never for long: Ray must not be shut down under a call.
            dead = [ranks[ref] for ref in ray.wait(list(ranks), num_returns=1, timeout=0)[0]]
        if dead:
            lifeline.lost(0.0)  # Ray may have been first: what the watchdog said has come since
            report(lifeline.overdue)
            executor.workers_died(dead)
            return
        del executor
