"""From settings to a Serve application; every deployment option is decided here.

Only the workers' bundles ask for CPUs or GPUs. Everything else (ingress, engine replicas, sessions, the directory) is
there to wait and to pass on, and asks for none, so that a node's devices are all the workers'.
"""

from __future__ import annotations

from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from serve_app.engine import EngineDeployment
from serve_app.ingress import IngressDeployment
from serve_app.settings import ModelSettings, SessionSettings, Settings

APP = "interpose"
# As many tenants may have as many traces waiting at a replica as a tenant may; beyond that, they wait in the sessions.
WAITING_TENANTS = 8
ROUTER = "actors.routing.SessionRouter"


def build(settings: Settings) -> Application:
    """Return the application: one ingress, and one engine deployment for each model.

    Args:
        settings: of the whole service.

    Raises:
        ValueError: Serve would not take an `autoscaling_config`.
    """
    engines = {model.name: build_model(model, settings.sessions) for model in settings.models}
    ingress = serve.deployment(
        name="ingress",
        num_replicas=settings.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        # Every running trace holds one call open.
        max_ongoing_requests=4096,
        max_queued_requests=4096,
        health_check_period_s=5,
        # Those calls may last as long as a trace; a client whose call is cut comes back through another replica.
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=1,
    )(IngressDeployment)
    return ingress.bind(settings, engines)


def build_model(model: ModelSettings, sessions: SessionSettings | None = None) -> Application:
    """Return the engine deployment of one model; alone it is an application that another one's ingress finds by itself.

    Args:
        model: what to serve.
        sessions: of the service, if they are known here.

    Raises:
        ValueError: Serve would not take its `autoscaling_config`.
    """
    deployment = serve.deployment(
        name=model.deployment,
        ray_actor_options={"num_cpus": 0, "num_gpus": 0},
        # The replica lives in the first bundle without using any of it; its workers take one bundle each.
        placement_group_bundles=[worker_bundle(model)] * model.world_size,
        placement_group_strategy=model.placement,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        # The replica itself says which of them run (`serve_app.places`), and how many of a tenant's wait.
        max_ongoing_requests=model.max_running_traces + WAITING_TENANTS * model.max_waiting_traces,
        max_queued_requests=model.max_waiting_traces,
        # Three failures in a row replace a replica.
        health_check_period_s=2,
        health_check_timeout_s=30,
        # Serve waits this long for the calls that a removed replica has, each of which is a running trace.
        graceful_shutdown_timeout_s=model.drain_seconds,
        graceful_shutdown_wait_loop_s=1,
        **_count(model, alone=sessions is None),
    )(EngineDeployment)
    return deployment.bind(model, sessions or SessionSettings())


def _count(model: ModelSettings, alone: bool) -> dict[str, Any]:
    config = autoscaling(model, alone)
    return {"num_replicas": model.replicas} if config is None else {"autoscaling_config": config}


def autoscaling(model: ModelSettings, alone: bool = False) -> AutoscalingConfig | None:
    """Return how Serve is to choose the number of a model's replicas; None if it is fixed.

    What it counts are calls of engines by sessions: one for each trace that waits or runs, from its beginning to its end.

    Args:
        model: the model.
        alone: whether it is an application of its own.

    Raises:
        ValueError: Serve takes no such settings, with its reason; or the ingress could not find the model.
    """
    given = model.autoscaling_config
    if given is None:
        return None
    where = f"autoscaling_config of {model.name}"
    # Serve's model takes what it does not know, and forgets it.
    unknown = sorted(given.keys() - AutoscalingConfig.model_fields.keys())
    if unknown:
        raise ValueError(f"{where}: Ray Serve has no {', '.join(unknown)}")
    try:
        config = AutoscalingConfig(**given)
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}".lstrip(": ") for one in error.errors()]
        raise ValueError(f"{where}: {'; '.join(reasons)}") from None
    if alone and model.scales_to_zero:
        raise ValueError(
            f"{where}: min_replicas is at least 1 for a model that is an application of its own, of which the service knows "
            "by its engines only; list it under the service's `models`"
        )
    return config


def worker_bundle(model: ModelSettings) -> dict[str, float]:
    """Return what one worker needs: one GPU, or one CPU where the cluster has no GPUs."""
    device = model.device
    if device == "auto":
        device = "gpu" if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
    return {"GPU": 1.0} if device == "gpu" else {"CPU": 1.0}
