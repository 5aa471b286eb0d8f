"""From settings to a Serve application; every deployment option is decided here.

Only the workers' bundles ask for CPUs or GPUs. Everything else (ingress, engine replicas, sessions, the directory) is
there to wait and to pass on, and asks for none, so that a node's devices are all the workers'.
"""

from __future__ import annotations

import ray
from ray import serve
from ray.serve import Application

from serve_app.engine import EngineDeployment
from serve_app.ingress import IngressDeployment
from serve_app.settings import ModelSettings, Settings

APP = "interpose"


def build(settings: Settings) -> Application:
    """Return the application: one ingress, and one engine deployment for each model.

    Args:
        settings: of the whole service.
    """
    engines = {model.name: _engine(model, settings) for model in settings.models}
    ingress = serve.deployment(
        name="ingress",
        num_replicas=settings.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        # Every running trace holds one call open.
        max_ongoing_requests=4096,
        max_queued_requests=4096,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=1,
    )(IngressDeployment)
    return ingress.bind(settings, engines)


def _engine(model: ModelSettings, settings: Settings) -> Application:
    deployment = serve.deployment(
        name=model.deployment,
        num_replicas=model.replicas,
        ray_actor_options={"num_cpus": 0, "num_gpus": 0},
        # The replica lives in the first bundle without using any of it; its workers take one bundle each.
        placement_group_bundles=[worker_bundle(model)] * model.world_size,
        placement_group_strategy="PACK",
        max_ongoing_requests=model.max_running_traces,
        max_queued_requests=model.max_waiting_traces,
        # Three failures in a row replace a replica.
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=20,
        graceful_shutdown_wait_loop_s=1,
    )(EngineDeployment)
    return deployment.bind(model, settings.sessions)


def worker_bundle(model: ModelSettings) -> dict[str, float]:
    """Return what one worker needs: one GPU, or one CPU where the cluster has no GPUs."""
    device = model.device
    if device == "auto":
        device = "gpu" if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
    return {"GPU": 1.0} if device == "gpu" else {"CPU": 1.0}
