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
from serve_app.gate import Gate
from serve_app.keys import HASHES_VARIABLE, KnownKeys

FUNCTIONS = ["serve_app.proxy.add_interpose", "serve_app.proxy.add_health"]


class _Gated:
    """A server on which a generated function registers a servicer's methods, behind a `Gate`.

    Args:
        server: Serve's.
        keyless: whether the methods need no key.
    """

    def __init__(self, server: Any, *, keyless: bool) -> None:
        self._server = server
        self._keyless = keyless

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add handlers so that one is looked up when only the metadata of a call is there."""
        hashes = os.environ.get(HASHES_VARIABLE, "")
        keys = KnownKeys(hashes) if hashes else None
        for handler in handlers:
            self._server.add_generic_rpc_handlers((Gate(handler._method_handlers, keys, keyless=self._keyless),))

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        """Leave these out: they are the same, and a server would find them by the method's name alone."""


def add_interpose(servicer: Any, server: Any) -> None:
    """Register the Interpose service."""
    service_pb2_grpc.add_InterposeServicer_to_server(servicer, _Gated(server, keyless=False))


def add_health(servicer: Any, server: Any) -> None:
    """Register grpc.health.v1.Health."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, _Gated(server, keyless=True))


def listen_on_host() -> list[Any]:
    """Make the proxy listen on the configured host only; Serve calls this in the proxy's process before it opens ports.

    Returns:
        No middleware: Serve asks this callback for HTTP middlewares.
    """
    host = os.environ.get(HOST_VARIABLE, "")
    if host:
        listening.proxy_on(host)
    return []
