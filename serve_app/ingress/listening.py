"""Makes Serve's own gRPC servers listen as the settings say: host, bounds, certificates.

Serve binds them to every interface, with gRPC's own bounds, and has no settings for that. In Serve's modules a class and two
functions are replaced here, in the same process, before Serve uses them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc

from serve_app.environment import THIS_MACHINE_ONLY
from serve_app.ingress.certificates import Certificates
from serve_app.settings import GrpcSettings

# What clients may call besides the services that the settings name: whether the proxy lives.
_OF_SERVE = "/ray.serve.RayServeAPIService/"
_HEALTH = f"{_OF_SERVE}Healthz"
_REFLECTION = "/grpc.reflection."
# Seconds between a server's pings on a quiet connection, and seconds for the answer: a client that is gone is noticed.
_PING_SECONDS, _ANSWER_SECONDS = 60.0, 20.0
_METADATA_BYTES = 16 << 10


def options_of(settings: GrpcSettings) -> list[tuple[str, int]]:
    """Return the options of a gRPC server with the bounds of the settings."""
    return [
        ("grpc.server_handshake_timeout_ms", _ms(settings.handshake_seconds)),
        ("grpc.max_connection_idle_ms", _ms(settings.idle_seconds)),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", settings.streams_per_connection),
        ("grpc.keepalive_time_ms", _ms(_PING_SECONDS)),
        ("grpc.keepalive_timeout_ms", _ms(_ANSWER_SECONDS)),
        # The client pings every 330 s. A connection that pings more often than every 5 minutes without need is closed.
        ("grpc.http2.min_ping_interval_without_data_ms", 300_000),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
    ]


def proxy_on(settings: GrpcSettings, listening: Callable[[int], object] = lambda port: None) -> None:
    """Make this process, one of Serve's proxies, listen for gRPC as the settings say.

    Args:
        settings: the address, the bounds and the certificates.
        listening: called with the port once the server has it.
    """
    from ray.serve._private import default_impl, grpc_util

    bounds = options_of(settings)

    class BoundedServer(grpc_util.gRPCGenericServer):
        """Serve's server with bounds, without Serve's own calls for the names of all applications."""

        def __init__(self, service_handler_factory: Any, *, extra_options: Any = None) -> None:
            super().__init__(service_handler_factory, extra_options=[*(extra_options or []), *bounds])

        def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
            handlers = generic_rpc_handlers[0]
            offered = _offered(getattr(handlers, "_method_handlers", {}))
            if offered:
                handlers._method_handlers = offered
                super().add_generic_rpc_handlers(generic_rpc_handlers)

        def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
            names = _offered({f"/{service_name}/{name}": name for name in method_handlers})
            if names:
                handlers = {name: method_handlers[name] for name in names.values()}
                super().add_registered_method_handlers(service_name, handlers)

    def add_grpc_address(grpc_server: Any, server_address: str) -> None:
        port = int(server_address.rsplit(":", 1)[1])
        address = f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"
        if _bind(grpc_server, address, settings) == 0:
            raise RuntimeError(f"the gRPC address {address} is taken")
        listening(port)

    grpc_util.gRPCGenericServer = BoundedServer
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


def _bind(server: Any, address: str, settings: GrpcSettings) -> int:
    if settings.tls is None:
        return int(server.add_insecure_port(address))
    certificates = Certificates(settings.tls)
    credentials = grpc.dynamic_ssl_server_credentials(
        certificates.now(), certificates.changed, require_client_authentication=bool(settings.tls.client_ca)
    )
    return int(server.add_secure_port(address, credentials))


def _offered(methods: dict[str, Any]) -> dict[str, Any]:
    """Return the methods that clients may call."""
    return {
        name: method
        for name, method in methods.items()
        if name == _HEALTH or not name.startswith((_OF_SERVE, _REFLECTION))
    }


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
