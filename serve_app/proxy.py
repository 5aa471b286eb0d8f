"""What Serve's proxies load: the service's methods, the gRPC port, and no pages of Serve's.

Serve calls these functions in its proxy process, with a server that routes every method to the application. The proxy
passes a request's bytes on unparsed. So the ingress, not the proxy, answers malformed messages.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from pydantic_settings import BaseSettings, SettingsConfigDict
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import operator_pb2_grpc, service_pb2_grpc
from interpose.v1 import trace_pb2 as pb
from serve_app.environment import GRPC_VARIABLE
from serve_app.ingress import listening
from serve_app.ingress.callers import Call, Callers
from serve_app.ingress.connections import Connections
from serve_app.ingress.gate import Gate
from serve_app.ingress.openai_errors import BODY_BYTES, BODY_KEY, answer_of
from serve_app.secrecy import keep_to_itself
from serve_app.settings import PREFIX, GrpcSettings, HttpSettings
from serve_app.tenants.book import Keyring, running_directory
from serve_app.tenants.keys import key_of

FUNCTIONS = ["serve_app.proxy.add_interpose", "serve_app.proxy.add_operator", "serve_app.proxy.add_health"]
# The path that says whether the proxy lives: Serve's own tools and KubeRay ask for it.
_ALIVE = "/-/healthz"

_ports: list[int] = []
_tasks: list[asyncio.Task[None]] = []


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="ignore", frozen=True)

    grpc: GrpcSettings = GrpcSettings()
    http: HttpSettings = HttpSettings()


class _Gated:
    """A server on which a generated function registers a servicer's methods, behind a `Gate`.

    Args:
        server: Serve's gRPC server.
        callers: of the proxy.
        keyless: whether the methods need no key.
    """

    def __init__(self, server: Any, callers: Callers, *, keyless: bool) -> None:
        self._server = server
        self._callers = callers
        self._keyless = keyless

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add handlers that are looked up as soon as a call's metadata is there."""
        for handler in handlers:
            gate = Gate(handler._method_handlers, self._callers, keyless=self._keyless)
            self._server.add_generic_rpc_handlers((gate,))

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        """Do nothing.

        These are the same handlers, and a server would find them by the method's name alone, without the `Gate`.
        """


def add_interpose(servicer: Any, server: Any) -> None:
    """Register the Interpose service."""
    service_pb2_grpc.add_InterposeServicer_to_server(servicer, _Gated(server, callers(), keyless=False))


def add_operator(servicer: Any, server: Any) -> None:
    """Register the calls of operators."""
    operator_pb2_grpc.add_OperatorServicer_to_server(servicer, _Gated(server, callers(), keyless=False))


def add_health(servicer: Any, server: Any) -> None:
    """Register grpc.health.v1.Health."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, _Gated(server, callers(), keyless=True))


@functools.cache
def callers() -> Callers:
    """Return the callers of this proxy, and begin to follow the keys and the connections.

    Serve calls the functions of this module on the event loop of the proxy.
    """
    settings = grpc_settings()
    keys = Keyring()
    connections = [Connections(port, settings, lambda: made.accepted) for port in _ports]
    made = Callers(keys, settings, connections[0].now if connections else None)
    loop = asyncio.get_running_loop()
    _tasks.extend(loop.create_task(one.watch(made.forget)) for one in connections)
    _tasks.extend((loop.create_task(keys.follow(running_directory)), loop.create_task(made.watch())))
    return made


def grpc_settings() -> GrpcSettings:
    """Return the settings of the gRPC port from the environment."""
    return _Environment().grpc


def listen_on_host() -> list[Any]:
    """Make the proxy listen as the settings say.

    Serve calls this in the proxy's process before it opens ports.

    Returns:
        The middlewares of Serve's HTTP proxy. It says that it lives, and lets callers with a key at the endpoint.
    """
    keep_to_itself()  # the keys of calls pass through this process
    if any(name.upper().startswith(GRPC_VARIABLE.rstrip("_")) for name in os.environ):
        listening.proxy_on(grpc_settings(), _ports.append)
    return [Middleware(HttpGate, callers if _Environment().http.openai else None)]


class HttpGate:
    """Lets requests of the OpenAI-compatible endpoint pass, if their key is known.

    Every other request is answered with 404. The question whether the proxy lives needs no key. A body is received only from a
    known caller, and within bounds. It goes to the ingress in the request's scope; otherwise the ingress would fetch it by a
    call of its own.

    Args:
        app: what answers.
        callers: returns the callers of the proxy; None: there is no endpoint.
    """

    def __init__(self, app: ASGIApp, callers: Callable[[], Callers] | None = None) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or (scope["type"] == "http" and path == _ALIVE):
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and self._callers is not None and path.startswith("/v1/"):
            await self._called(self._callers(), scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"nothing is served here: traces go over gRPC\n"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _called(self, callers: Callers, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        peer = "ipv4:{}:{}".format(*(scope.get("client") or ("", 0)))
        begun = False

        async def sent(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with callers.call(key_of(headers.items()), peer) as call:
                received = _Bounded(receive, _size(headers.get("content-length", "")), callers, call)
                body = await received.body()
                if body is not None:
                    await self._app({**scope, BODY_KEY: body}, receive, sent)
        except ServiceFailure as error:
            if not begun:
                await answer_of(error.failure)(scope, receive, send)


class _Bounded:
    """Receives a request's body within bounds of size and time.

    Args:
        receive: of the server.
        size: bytes that the request says it has.
        callers: of the proxy.
        call: the request.

    Raises:
        ServiceFailure: INVALID_ARGUMENT, the body is too long; DEADLINE_EXCEEDED, it does not come.
    """

    def __init__(self, receive: Receive, size: int, callers: Callers, call: Call) -> None:
        self._receive = receive
        self._callers = callers
        self._call = call
        self._left = BODY_BYTES
        self._take(size, 0)

    async def body(self) -> bytes | None:
        """Return the whole body; None if the client has gone before its end."""
        data, more = bytearray(), True
        while more:
            async with self._callers.receiving(self._call):
                message = await self._receive()
            if message["type"] != "http.request":
                return None
            more, piece = bool(message.get("more_body")), message.get("body", b"")
            self._take(0, len(piece))
            data += piece
        return bytes(data)

    def _take(self, said: int, here: int) -> None:
        self._left -= here
        if self._left < 0 or said > self._left:
            message = f"the body has more than {BODY_BYTES} bytes"
            raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message))


def _size(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
