"""Turns settings into a Serve application; every deployment option is decided here.

Only the workers' bundles ask for CPUs or GPUs. The ingress, the engine replicas, the session actors and the directory wait
and pass on; they ask for none. So a node's devices are all for the workers.
"""

from __future__ import annotations

from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from actors.placement import on_the_head, remote
from actors.telemetry.options import Options
from serve_app.engine import EngineDeployment
from serve_app.ingress.deployment import IngressDeployment
from serve_app.settings import ModelSettings, SessionSettings, Settings
from serve_app.settings_trust import decided
from serve_app.tenants.book import KeyBook, book_of

APP = "interpose"
# Tenants that may each have `max_waiting_traces` traces waiting at one replica. Further traces wait in their sessions.
WAITING_TENANTS = 8
ROUTER = "actors.routing.SessionRouter"


def build(settings: Settings) -> Application:
    """Return the application: one ingress, and one engine deployment for each model.

    Args:
        settings: of the whole service.

    Raises:
        ValueError: Serve would not take an `autoscaling_config`, or the file of tenants is missing or wrong.
    """
    book = _book(settings)
    models = decided(settings.models, book.all, bool(settings.tenants_file))
    engines = {
        model.name: build_model(model, settings.sessions, settings.telemetry, settings.metrics.engine)
        for model in models
    }
    ingress = serve.deployment(
        name="ingress",
        num_replicas=settings.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        # Each running trace holds one call open.
        max_ongoing_requests=4096,
        max_queued_requests=4096,
        health_check_period_s=5,
        # These calls last as long as their traces. A client whose call is cut comes back through another ingress replica.
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=1,
    )(IngressDeployment)
    return ingress.bind(settings.model_copy(update={"tenants": book.all, "models": models}), engines, book)


def _book(settings: Settings) -> KeyBook:
    """Return the book of keys; the file of tenants is on the node of the cluster's head.

    Raises:
        ValueError: the file is missing or wrong.
    """
    if not (settings.tenants_file and ray.is_initialized()):
        return book_of(settings.tenants, settings.tenants_file)
    read = remote(book_of).options(num_cpus=0, scheduling_strategy=on_the_head())
    try:
        book: KeyBook = ray.get(read.remote(settings.tenants, settings.tenants_file))
    except ray.exceptions.RayTaskError as error:
        raise ValueError(str(error.cause)) from None
    return book


def build_model(
    model: ModelSettings,
    sessions: SessionSettings | None = None,
    options: Options | None = None,
    engine_metrics: bool = True,
) -> Application:
    """Return the engine deployment of one model.

    Deployed alone, it is an application; the ingress of the service finds it by itself.

    Args:
        model: settings of the model.
        sessions: settings of the service's sessions, if they are known here.
        options: what the replicas write for operators.
        engine_metrics: whether vLLM's own metrics are exported.

    Raises:
        ValueError: Serve refuses the model's `autoscaling_config`.
    """
    deployment = serve.deployment(
        name=model.deployment,
        ray_actor_options={"num_cpus": 0, "num_gpus": 0},
        # The replica process lives in the first bundle and uses nothing of it. Each worker takes one bundle.
        placement_group_bundles=[worker_bundle(model)] * model.world_size,
        placement_group_strategy=model.placement,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        # The replica itself decides which traces run, and how many traces of a tenant wait (`serve_app.tenants.seats`).
        max_ongoing_requests=model.max_running_traces + WAITING_TENANTS * model.max_waiting_traces,
        max_queued_requests=model.max_waiting_traces,
        # Three failures in a row replace a replica.
        health_check_period_s=2,
        health_check_timeout_s=30,
        # Before Serve ends a replica it waits this long for the replica's calls. Each call is a running trace.
        graceful_shutdown_timeout_s=model.drain_seconds,
        graceful_shutdown_wait_loop_s=1,
        **_count(model, alone=sessions is None),
    )(EngineDeployment)
    if model.sandbox == "auto":  # a model of its own, whose service's tenants are not known here
        [model] = decided([model], (), grows=True)
    return deployment.bind(model, sessions or SessionSettings(), options or Options(), engine_metrics)


def _count(model: ModelSettings, alone: bool) -> dict[str, Any]:
    config = autoscaling(model, alone)
    return {"num_replicas": model.replicas} if config is None else {"autoscaling_config": config}


def autoscaling(model: ModelSettings, alone: bool = False) -> AutoscalingConfig | None:
    """Return how Serve chooses the number of a model's replicas; None for a fixed number.

    Serve counts the sessions' calls to engines: one call for each trace that waits or runs, from its beginning to its end.

    Args:
        model: settings of the model.
        alone: whether the model is an application of its own.

    Raises:
        ValueError: Serve refuses the settings, with Serve's reason; or the ingress could not find the model.
    """
    given = model.autoscaling_config
    if given is None:
        return None
    where = f"autoscaling_config of {model.name}"
    # Serve's settings class accepts unknown keys and ignores them.
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
    """Return the resources of one worker: one GPU, or one CPU where the cluster has no GPUs."""
    device = model.device
    if device == "auto":
        device = "gpu" if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
    return {"GPU": 1.0} if device == "gpu" else {"CPU": 1.0}
