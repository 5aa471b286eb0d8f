"""Makes Serve's own gRPC servers listen on one host only.

Serve binds them to every interface and has no setting for that. In both places one function of a module adds the address;
that function is replaced here, in the same process, before Serve calls it.
"""

from __future__ import annotations

import os
from typing import Any

from serve_app.environment import THIS_MACHINE_ONLY


def proxy_on(host: str) -> None:
    """Make this process, one of Serve's proxies, listen for gRPC on `host`."""
    from ray.serve._private import default_impl

    def add_grpc_address(grpc_server: Any, server_address: str) -> None:
        address = f"{host}:{server_address.rsplit(':', 1)[1]}"
        if grpc_server.add_insecure_port(address) == 0:
            raise RuntimeError(f"the gRPC address {address} is taken")

    default_impl.add_grpc_address = add_grpc_address


def replica_on_this_machine() -> None:
    """Make this replica take calls from other replicas on the loopback interface only.

    This applies if all nodes are on one machine. Ray's token protects the port in any case.
    """
    name, value = THIS_MACHINE_ONLY
    if os.environ.get(name) != value:
        return
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    def add_local_port(server: Any, address: str) -> Any:
        return add_port_to_grpc_server(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = add_local_port
