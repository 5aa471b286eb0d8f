"""The health of the service, as gRPC asks for it (grpc.health.v1.Health)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2

from actors.telemetry.telemetry import Telemetry
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.calls import streaming, unary
from serve_app.settings import Tenant
from serve_app.tenants.book import Keyring

SERVICE = "interpose.v1.Interpose"
# The service name that a readiness probe asks for: it is healthy if calls arrive here through the proxy, whatever the models do.
PROXY = "proxy"
# Health watchers at a time. Each watcher holds one of the ingress's calls and needs no key.
MAX_WATCHERS = 64


class HealthCalls(ABC):
    """The calls of grpc.health.v1.Health, which need no key.

    Attributes:
        keys: the tenants and their keys.
        max_message_bytes: bytes of the longest message that any model takes.
        telemetry: what this replica tells operators.
    """

    keys: Keyring
    max_message_bytes: int
    telemetry: Telemetry

    def __init__(self) -> None:
        self._watchers = 0  # open `Watch` calls

    @abstractmethod
    async def _serving(self) -> bool:
        """Return whether any model runs traces or would start for a request."""

    @unary(health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, keyless=True)
    async def Check(self, request: health_pb2.HealthCheckRequest, _: Tenant) -> health_pb2.HealthCheckResponse:
        """Return the health of a model or of the service.

        The service is SERVING while any model runs traces or would start for a request.
        `PROXY` is SERVING while the ingress answers.
        """
        return await self._health(request.service)

    @streaming(health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, keyless=True)
    async def Watch(
        self, request: health_pb2.HealthCheckRequest, _: Tenant
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Yield the health now and after each change."""
        if self._watchers >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} callers watch already: ask now and then with Check"
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message))
        self._watchers += 1
        try:
            last = None
            while True:
                health = await self._health(request.service)
                if health.status != last:
                    last = health.status
                    yield health
                await asyncio.sleep(1.0)
        finally:
            self._watchers -= 1

    # Releases of grpcio-health-checking before 1.85 do not have this method. A call of it is answered UNIMPLEMENTED then.
    if hasattr(health_pb2, "HealthListRequest"):

        @unary(health_pb2.HealthListRequest, health_pb2.HealthListResponse, keyless=True)
        async def List(self, _: health_pb2.HealthListRequest, __: Tenant) -> health_pb2.HealthListResponse:
            """Return the health of every service name."""
            serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
            return health_pb2.HealthListResponse(statuses={SERVICE: await self._health(""), PROXY: serving})

    async def _health(self, service: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if service == PROXY:
            return kinds(status=kinds.SERVING)
        if service not in ("", SERVICE):
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if await self._serving() else kinds.NOT_SERVING)
