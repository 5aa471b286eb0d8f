"""The calls of operators: traces of all tenants, drains, tenants and their usage."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from actors.telemetry.telemetry import Telemetry
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import operator_pb2 as pb
from interpose.v1 import trace_pb2
from interpose.v1.service_pb2 import TenantStatus
from serve_app.ingress.calls import caller, unary
from serve_app.ingress.replies import tenant_status
from serve_app.ingress.sessions import REPLICA_SECONDS, SessionCalls
from serve_app.models import ServedModel, ServedModels
from serve_app.settings import Settings, Tenant
from serve_app.tenants.admission import refuse
from serve_app.tenants.book import Keyring

# Characters of a name in a request.
_LONGEST = 200
_ROWS, _MOST_ROWS = 100, 1000


class OperatorCalls(ABC):
    """The calls of `interpose.v1.Operator`. Each is a line of the audit log.

    Attributes:
        settings: settings of the whole service.
        keys: the keys of the service.
        max_message_bytes: bytes of the longest message that any model takes.
        telemetry: what this replica tells operators.
    """

    settings: Settings
    keys: Keyring
    max_message_bytes: int
    telemetry: Telemetry
    _sessions: SessionCalls
    _models: ServedModels

    @unary(pb.ListTracesRequest, pb.ListTracesReply, operator=True)
    async def ListTraces(self, request: pb.ListTracesRequest, tenant: Tenant) -> pb.ListTracesReply:
        """List the traces of all tenants that wait or run."""
        _check(request.tenant, request.model)
        if request.most > _MOST_ROWS:
            raise refuse(f"a reply has up to {_MOST_ROWS} traces; {request.most} are asked for")
        most = request.most or _ROWS
        return await self._sessions.directory.traces.remote(request.tenant, request.model, most)

    @unary(pb.CancelTraceRequest, pb.CancelTraceReply, operator=True)
    async def CancelTrace(self, request: pb.CancelTraceRequest, tenant: Tenant) -> pb.CancelTraceReply:
        """Cancel a trace of any tenant."""
        _check(request.key)
        if not request.key:
            raise refuse("say which trace: a key, as the list of traces has it")
        self._note("cancel", tenant, trace=request.key)
        return pb.CancelTraceReply(found=await self._sessions.directory.cancel_trace.remote(request.key))

    @unary(pb.DrainRequest, pb.DrainReply, operator=True)
    async def Drain(self, request: pb.DrainRequest, tenant: Tenant) -> pb.DrainReply:
        """Make replicas take no new traces, or take them again.

        When the reply comes, no ingress replica sends them new traces any more.
        """
        _check(request.model, request.replica)
        if request.replica and not request.model:
            raise refuse("say whose replica it is: a model")
        served = await self._model(request.model) if request.model else None
        self._note("drain", tenant, model=request.model, replica=request.replica, end=request.end)
        directory = self._sessions.directory
        asked = served.target if served is not None else None, request.model, request.replica
        reply = await directory.drain.remote(*asked, request.end)
        if reply is not None and not request.end:
            await asyncio.sleep(REPLICA_SECONDS)  # so long an ingress replica knows where a session's traces go
            reply = await directory.drain.remote(*asked, request.end)
        if reply is None:
            message = f"{request.model} has no replica {request.replica!r}; `interpose status` lists them"
            raise ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, message))
        return reply

    @unary(pb.ListTenantsRequest, pb.ListTenantsReply, operator=True)
    async def ListTenants(self, request: pb.ListTenantsRequest, tenant: Tenant) -> pb.ListTenantsReply:
        """List the tenants with what they hold and may hold."""
        used = {usage.name: tenant_status(usage) for usage in await self._sessions.directory.usage.remote()}
        rows = (
            pb.TenantRow(
                use=used.get(one.name, TenantStatus(name=one.name)),
                trust=one.trust,
                operator=one.operator,
                keys=len(one.api_keys),
            )
            for one in self.settings.tenants
        )
        return pb.ListTenantsReply(tenants=rows)

    @unary(pb.GetUsageRequest, pb.GetUsageReply, operator=True)
    async def GetUsage(self, request: pb.GetUsageRequest, tenant: Tenant) -> pb.GetUsageReply:
        """Tell what tenants have used since the directory began."""
        _check(request.tenant)
        await self._tell()
        return await self._sessions.directory.used.remote(request.tenant)

    @abstractmethod
    async def _model(self, name: str) -> ServedModel:
        raise NotImplementedError

    @abstractmethod
    async def _tell(self) -> None:
        """Give the directory what this replica has counted."""
        raise NotImplementedError

    @abstractmethod
    def _audit(self, line: dict[str, Any]) -> None:
        raise NotImplementedError

    def _note(self, action: str, tenant: Tenant, **fields: object) -> None:
        self._audit({"action": action, "tenant": tenant.name, "key": caller().key, **fields})


def _check(*names: str) -> None:
    if any(len(name) > _LONGEST for name in names):
        raise refuse(f"a name in this request has more than {_LONGEST} characters")
