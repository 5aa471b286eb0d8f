"""The Kubernetes manifests as far as they can be tried without Kubernetes: the application, a probe, and the smoke job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.cluster import KEY, ROOT
from tests.e2e.service import clean_environment

OVERLAY = ROOT / "k8s" / "overlays" / "cpu-dev" / "serve.yaml"
RAYSERVICE = ROOT / "k8s" / "base" / "rayservice.yaml"
SMOKE_JOB = ROOT / "k8s" / "smoke" / "job.yaml"


def serve_config() -> str:
    """`serveConfigV2` of `k8s/overlays/cpu-dev`, to the letter."""
    text: str = yaml.safe_load(OVERLAY.read_text())["spec"]["serveConfigV2"]
    return text


def overlay() -> tuple[dict[str, Any], dict[str, Any]]:
    """What that says, and the settings of the model in it."""
    config = yaml.safe_load(serve_config())
    (application,) = config["applications"]
    (settings,) = application["args"]["models"]
    return config, settings


def pod_is_ready(address: str) -> bool:
    """What the workers' readiness probe in `k8s/base` finds at their gRPC port."""
    cluster = yaml.safe_load(RAYSERVICE.read_text())["spec"]["rayClusterConfig"]
    (container,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    request = health_pb2.HealthCheckRequest(service=container["readinessProbe"]["grpc"]["service"])
    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def run_smoke_job(address: str, folder: Path) -> None:
    """The command of `k8s/smoke`, with what the cluster puts into its environment."""
    (container,) = yaml.safe_load(SMOKE_JOB.read_text())["spec"]["template"]["spec"]["containers"]
    assert {variable["name"] for variable in container["env"]} == {"INTERPOSE_ADDRESS", "INTERPOSE_API_KEY"}
    program, *arguments = container["command"]
    assert program == "python"
    environment = clean_environment() | {"INTERPOSE_ADDRESS": address, "INTERPOSE_API_KEY": KEY, "HOME": str(folder)}
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tiny: works" in result.stdout
