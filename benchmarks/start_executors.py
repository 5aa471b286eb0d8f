"""The two executors whose starts are compared; each notes when its actors are up.

Actors unpickle the classes that are defined here, so this module is imported in them. The stock executor's actors are vLLM's own
class, whose module imports all of vLLM. The lazy actors are a class of `executor.cluster.actor`, which imports nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from executor.cluster.executor import LazyRayExecutor

_POLL_SECONDS = 0.002
UP_SECONDS = 600.0


class Watched(RayExecutorV2):
    """Mixed in before an executor: notes when the constructors of all actors have returned."""

    def _init_executor(self) -> None:
        self._up = 0.0
        self._watcher = threading.Thread(target=self._wait_for_actors, name="benchmark-watch", daemon=True)
        self._watcher.start()
        super()._init_executor()

    def _wait_for_actors(self) -> None:
        count = self.parallel_config.world_size
        while len(getattr(self, "ray_worker_handles", ())) < count:
            time.sleep(_POLL_SECONDS)
        # Ray answers this call when the constructor has returned, before any later call.
        ray.get([handle.actor.__ray_ready__.remote() for handle in self.ray_worker_handles])
        self._up = time.perf_counter()

    def constructed(self) -> float:
        """Return when the last actor's constructor had returned, by `time.perf_counter`."""
        self._watcher.join(UP_SECONDS)
        return self._up


class LazyStart(Watched, LazyRayExecutor):
    """The system's executor."""


class StockStart(Watched):
    """vLLM's executor, made to run on CPUs.

    vLLM's executor refuses CPUs because they have no name among Ray's devices; here they are given one.
    """

    def _init_executor(self) -> None:
        with contextlib.ExitStack() as stack:
            if current_platform.is_cpu():
                stack.enter_context(_cpus_for_devices())
            super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # Ray has other words for CPUs than for other resources. A worker takes the CPUs of its bundle.
        return {} if current_platform.is_cpu() else RayExecutorV2._get_actor_resource_kwargs()


# The executor that an engine names, and the executor that is timed.
STARTS = {"stock": (RayExecutorV2, StockStart), "lazy": (LazyRayExecutor, LazyStart)}


class CPUWorkerProc(RayWorkerProc):
    """vLLM's actor, for a CPU without a device to report."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


@contextlib.contextmanager
def _cpus_for_devices() -> Iterator[None]:
    with (
        patch.object(current_platform, "ray_device_key", "CPU"),
        patch.object(ray_executor_v2, "RayWorkerProc", CPUWorkerProc),
    ):
        yield
