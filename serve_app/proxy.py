"""What Serve's gRPC proxy loads: the methods of the service, and the host to listen on.

Serve calls these functions in its proxy process, with a server that routes every method to the application. The proxy
passes a request's bytes on unparsed. So the ingress, not the proxy, answers malformed messages and measures long messages.
"""

from __future__ import annotations

import os
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from interpose.v1 import service_pb2_grpc
from serve_app.environment import HASHES_VARIABLE, HOST_VARIABLE
from serve_app.ingress import listening
from serve_app.ingress.gate import Gate
from serve_app.settings import ApiKey, Tenant
from serve_app.tenants.keys import KeyTable

FUNCTIONS = ["serve_app.proxy.add_interpose", "serve_app.proxy.add_health"]


class _Gated:
    """A server on which a generated function registers a servicer's methods, behind a `Gate`.

    Args:
        server: Serve's gRPC server.
        keyless: whether the methods need no key.
    """

    def __init__(self, server: Any, *, keyless: bool) -> None:
        self._server = server
        self._keyless = keyless

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add handlers that are looked up as soon as a call's metadata is there."""
        hashes = os.environ.get(HASHES_VARIABLE, "")
        keys = _table(hashes) if hashes else None
        for handler in handlers:
            self._server.add_generic_rpc_handlers((Gate(handler._method_handlers, keys, keyless=self._keyless),))

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        """Do nothing.

        These are the same handlers, and a server would find them by the method's name alone, without the `Gate`.
        """


def add_interpose(servicer: Any, server: Any) -> None:
    """Register the Interpose service."""
    service_pb2_grpc.add_InterposeServicer_to_server(servicer, _Gated(server, keyless=False))


def add_health(servicer: Any, server: Any) -> None:
    """Register grpc.health.v1.Health."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, _Gated(server, keyless=True))


def _table(hashes: str) -> KeyTable:
    lines = (line.partition(" ") for line in hashes.splitlines())
    keys = [ApiKey(id="" if name == "-" else name, hash=text) for name, _, text in lines]
    return KeyTable([Tenant(name="known", api_keys=tuple(keys))])


def listen_on_host() -> list[Any]:
    """Make the proxy listen on the configured host only.

    Serve calls this in the proxy's process before it opens ports.

    Returns:
        An empty list: Serve asks this callback for HTTP middlewares.
    """
    host = os.environ.get(HOST_VARIABLE, "")
    if host:
        listening.proxy_on(host)
    return []
