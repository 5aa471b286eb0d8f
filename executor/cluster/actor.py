"""The Ray actor that becomes a vLLM worker: constructed without importing anything heavy.

vLLM's own actor class lives in a module that imports torch and all of vLLM, and its constructor takes vLLM's config, so
both are imported while Ray is still setting the actor up; next to Ray's gRPC that import has crashed actors, and it hides
the longest part of a start. This class imports the standard library only. All ranks import vLLM side by side in `prepare`, when
they are up and can say how far they have come; their configuration arrives as bytes and is opened in `initialize`.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import Any


class LazyWorkerActor:
    """A placeholder for one worker until `initialize`.

    Args:
        rank: the worker's rank in the engine.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._created = time.monotonic()
        self._startup: Any = None
        self._worker: Any = None

    def place(self, device_key: str) -> tuple[str, list[str]]:
        """Return this actor's node id and the accelerator ids that Ray gave it.

        There are no accelerator ids for the `device_key` "".
        """
        import ray

        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids()[device_key] if device_key else []
        return context.get_node_id(), [str(one) for one in ids]

    def prepare(
        self, environment: dict[str, str], ticket: Any, startup: Any, files: tuple[str, str] = ("", "auto")
    ) -> None:
        """Import vLLM.

        Args:
            environment: variables to set where this node has none of its own.
            ticket: the engine's `lifeline.Ticket`.
            startup: a `startup.Startup`, to tell how far it has come.
            files: the model's folder and the format of its weights; "" for no folder.

        Raises:
            ValueError: this node does not have the model.
        """
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        import ray

        from executor.block import watchdog
        from executor.cluster.checkpoint import check_on_node
        from executor.cluster.environment import hide_keys
        from executor.cluster.liveness import hold
        from executor.cluster.network import use_interface_of

        hide_keys()
        watchdog.start(hold(ticket, self.rank))
        use_interface_of(ray.util.get_node_ip_address())
        self._startup = startup
        startup.remember()
        check_on_node(*files, node=ray.util.get_node_ip_address())
        startup.tell("importing vLLM")
        import executor.cluster.worker_process  # noqa: F401

    def initialize(self, kwargs: bytes, **placement: Any) -> float:
        """Build the worker and load the model.

        Args:
            kwargs: the pickled arguments of vLLM's RayWorkerProc.
            placement: further arguments of RayWorkerProc.initialize_worker.

        Returns:
            Seconds since the actor was constructed.
        """
        from executor.cluster.environment import hide_credentials
        from executor.cluster.worker_process import LazyWorkerProc

        self._startup.tell("loading the model")
        self._worker = LazyWorkerProc(**pickle.loads(kwargs))
        self._worker.initialize_worker(**placement)
        hide_credentials()
        return float(self._startup.loaded(self._created))

    def create_dist_init_method(self, world_size: int) -> str:
        """Bind the address at which the workers find each other; rank 0's task."""
        from executor.cluster.worker_process import bind_store

        self._store, method = bind_store(world_size)
        return method

    def wait_for_init(self) -> dict[str, Any]:
        """Return the handle of the queue that the worker answers on."""
        return self._worker.wait_for_init()

    def run(self) -> None:
        """Serve the engine until it shuts down."""
        self._worker.run()
