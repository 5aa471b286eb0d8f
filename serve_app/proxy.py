"""What Serve's gRPC proxy loads: our methods, handed on unparsed, and the host that it listens on.

Serve calls the functions below in its proxy process, with a server that routes every method to the application. The
request's bytes go on as they are, so that the ingress, not the proxy, answers a malformed message and measures a long
one.
"""

from __future__ import annotations

import os
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from interpose.v1 import service_pb2_grpc
from serve_app import listening
from serve_app.environment import HOST_VARIABLE

FUNCTIONS = ["serve_app.proxy.add_interpose", "serve_app.proxy.add_health"]


class _Unparsed:
    """Registers a servicer's methods on a server without their request deserializers."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            handler._method_handlers = _unparsed(handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._server.add_registered_method_handlers(service, _unparsed(handlers))


def _unparsed(handlers: dict[str, Any]) -> dict[str, Any]:
    return {name: handler._replace(request_deserializer=None) for name, handler in handlers.items()}


def add_interpose(servicer: Any, server: Any) -> None:
    """Register the Interpose service."""
    service_pb2_grpc.add_InterposeServicer_to_server(servicer, _Unparsed(server))


def add_health(servicer: Any, server: Any) -> None:
    """Register grpc.health.v1.Health."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, _Unparsed(server))


def listen_on_host() -> list[Any]:
    """Make the proxy listen on the configured host only; Serve calls this in the proxy's process before it opens ports.

    Returns:
        No middleware: Serve asks this callback for HTTP middlewares.
    """
    host = os.environ.get(HOST_VARIABLE, "")
    if host:
        listening.proxy_on(host)
    return []
