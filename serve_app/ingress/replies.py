"""Replies of the ingress about the whole service: its limits, models and tenants."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from actors.protocol import DirectoryStatus, ModelState, TenantUsage
from interpose.contract.version import VERSION
from interpose.v1 import model_pb2, service_pb2
from serve_app.models import ServedModels
from serve_app.settings import Settings, Tenant

_VIEWS = 100  # entries in a list of canonical values
_REASON = 500  # characters of a reason


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
            **(views(served.description) if served.description is not None else {}),
        )
    for usage in known.tenants:
        if usage.name == tenant.name:
            reply.tenants.append(tenant_status(usage))
    return reply


def views(description: model_pb2.ModelDescription) -> dict[str, Any]:
    """Return which canonical values a model has and which it lacks, as fields of `ModelStatus`.

    A value of all layers is one entry. The entries and the reasons are bounded.
    """
    given: dict[str, None] = {}
    refused: Counter[tuple[str, str]] = Counter()
    for node in description.canonical:
        owner = re.sub(r"\.[0-9]+", "[i]", node.path)
        for value in node.values:
            name = f"{owner}.{value.name}"
            if value.refusal:
                refused[name, value.refusal[:_REASON]] += 1
            else:
                given[name] = None
    return {
        "layers": description.layers,
        "views": list(given)[:_VIEWS],
        "refused": [
            service_pb2.RefusedView(name=name, reason=reason, layers=layers)
            for (name, reason), layers in list(refused.items())[:_VIEWS]
        ],
    }


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
