"""The worker process inside a lazy actor: vLLM's own, and the address where the ranks meet."""

from __future__ import annotations

import socket

import ray
from torch.distributed import TCPStore
from vllm.utils.network_utils import get_distributed_init_method
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from executor.cluster.shared_memory import forget_names, forget_names_of_groups
from executor.cluster.spinning import spin_briefly


class LazyWorkerProc(RayWorkerProc):
    """vLLM's Ray worker process, built inside an actor that is already up."""

    def run(self) -> None:
        """Serve the engine until it shuts down."""
        # The executor calls it when all ranks are initialized and it has opened their answers.
        forget_names_of_groups()
        forget_names([self.worker_response_mq])
        spin_briefly([self.rpc_broadcast_mq])
        super().run()


def bind_store(world_size: int) -> tuple[TCPStore, str]:
    """Open the store at which the ranks meet on this node.

    Returns the store, which must stay open, and its address.
    """
    host = ray.util.get_node_ip_address()
    # Left to itself the store listens on every interface; only the nodes of the cluster have any business with it.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return store, get_distributed_init_method(host, port)
