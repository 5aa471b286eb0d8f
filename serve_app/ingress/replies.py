"""Replies of the ingress about the whole service: its limits, models and tenants."""

from __future__ import annotations

from typing import Any

from actors.protocol import DirectoryStatus, ModelState, TenantUsage
from interpose.contract.version import VERSION
from interpose.v1 import service_pb2
from serve_app.models import ServedModels
from serve_app.settings import Settings, Tenant


def limits(settings: Settings, tenant: Tenant) -> service_pb2.Limits:
    """Return the limits that hold for every model.

    A trace within these limits is allowed for each model.
    """
    all_limits = [model.limits for model in settings.models]

    def least(name: str) -> Any:
        return min(getattr(limits, name) for limits in all_limits)

    names = [field.name for field in service_pb2.Limits.DESCRIPTOR.fields if field.name != "pickled"]
    pickled = tenant.trust == "full" and all(limits.pickled for limits in all_limits)
    return service_pb2.Limits(pickled=pickled, **{name: least(name) for name in names})


def status(known: DirectoryStatus, models: ServedModels, tenant: Tenant) -> service_pb2.StatusReply:
    """Return the state of the models, their replicas, and the caller's own tenant."""
    reply = service_pb2.StatusReply(
        sessions=known.sessions,
        warm_sessions=known.warm,
        uptime_seconds=known.uptime_seconds,
        server_version=VERSION,
    )
    for served in models.all:
        model = served.settings
        state = known.models.get(served.target, ModelState("LOADING", 0, 0, 0))
        reply.models.add(
            name=model.name,
            state=served.state(state),
            replicas=state.replicas,
            running=state.running,
            waiting=state.waiting,
            adapters=list(model.lora_modules),
            each=[
                service_pb2.ReplicaStatus(
                    name=one.replica,
                    stage=one.stage,
                    seconds=one.seconds,
                    running=one.running,
                    waiting=one.waiting,
                    sessions=one.sessions,
                )
                for one in state.each
            ],
        )
    for usage in known.tenants:
        if usage.name == tenant.name:
            reply.tenants.append(tenant_status(usage))
    return reply


def tenant_status(usage: TenantUsage) -> service_pb2.TenantStatus:
    """Return what a tenant uses."""
    return service_pb2.TenantStatus(
        name=usage.name,
        sessions=usage.sessions,
        traces_running=usage.traces_running,
        traces_done=usage.done.traces,
        stored_bytes=usage.stored_bytes,
        traces_waiting=usage.traces_waiting,
        tokens=usage.done.tokens,
        saved_bytes=usage.done.saved_bytes,
        weight=usage.weight,
        quotas=usage.quotas,
    )
