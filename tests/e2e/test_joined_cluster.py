"""On a Ray cluster that runs already: `interpose serve` joins it, and Serve's own command deploys the application to it."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

import interpose
from interpose.errors import DeadlineExceeded, Unauthenticated, Unavailable
from tests.e2e.service import START_SECONDS, RunningService, clean_environment, free_port
from tests.e2e.test_fidelity import PROMPTS, Served, check_everything, read_everything
from tests.oracle import Oracle

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
OVERLAY = ROOT / "k8s" / "overlays" / "cpu-dev" / "serve.yaml"
RAYSERVICE = ROOT / "k8s" / "base" / "rayservice.yaml"
SMOKE_JOB = ROOT / "k8s" / "smoke" / "job.yaml"
KEY = "the key of the cluster's only tenant"

_STATE = """
import json, ray
from ray import serve
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
total, free = ray.cluster_resources(), ray.available_resources()
groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps({
    "nodes": len([node for node in ray.nodes() if node["Alive"]]),
    "cpus": total["CPU"] - free.get("CPU", 0.0),
    "groups": [len(set(group["bundles_to_node_id"].values())) for group in groups],
    "applications": {name: one.status for name, one in serve.status().applications.items()},
}))
"""

# `ray start` for one node of several on the loopback interface. The variable that keeps nodes there makes Ray's command refuse a
# second one, and only the command.
_START = """
import types
from ray._private import ray_constants
from ray.scripts import scripts
scripts.ray_constants = types.SimpleNamespace(**{**vars(ray_constants), "ENABLE_RAY_CLUSTER": True})
scripts.main()
"""

pytestmark = pytest.mark.timeout(500)


def ray_start(service: str) -> list[str]:
    """The arguments of `ray start` in a service of docker-compose.yml, which has one node for each on a network."""
    command = yaml.safe_load(COMPOSE.read_text())["services"][service]["command"]
    lines = [command] if command[0] == "ray" else [shlex.split(line) for line in command[-1].splitlines()]
    (arguments,) = (line[2:] for line in lines if line[:2] == ["ray", "start"])
    return arguments


class Cluster:
    """The Ray cluster of docker-compose.yml, a head without CPUs and two workers with one each, but on this machine's loopback
    interface. It belongs to nobody under test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = clean_environment() | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "VLLM_RPC_BASE_PATH": str(folder),
            # As the pods get it from a Secret; for what is built on the cluster, not for what joins it.
            "INTERPOSE_TENANTS": json.dumps([{"name": "tester", "api_key": KEY}]),
            # What docs/serving.md says of the proxy's address.
            "INTERPOSE_GRPC__HOST": "127.0.0.1",
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.proxy.listen_on_host",
            "PYTHONPATH": str(ROOT),
        }

    def start(self) -> Cluster:
        port = self.address.split(":")[1]
        head = [word.replace("--port=6379", f"--port={port}") for word in ray_start("head")]
        self._start_node("head", *head, "--block", f"--temp-dir={self._folder}")
        for name in ("worker-1", "worker-2"):
            worker = [word.replace("head:6379", self.address) for word in ray_start(name)]
            # Nodes of one machine share its ports.
            self._start_node(name, *worker, f"--dashboard-agent-listen-port={free_port()}")
        return self

    def _start_node(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-c", _START, "start", *arguments]
        command += ["--node-ip-address=127.0.0.1", "--object-store-memory=200000000"]
        log = self._folder / f"{name}.log"
        with log.open("w") as output:
            node = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        self._nodes.append(node)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    @property
    def joining(self) -> dict[str, str]:
        """The environment of a process that joins it."""
        names = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        return {"RAY_ADDRESS": self.address} | {name: self.environment[name] for name in names}

    def state(self) -> dict[str, Any]:
        """How many nodes there are, CPUs in use, over how many nodes each placement group spreads, and what Serve runs: asked
        by a process that joins the cluster for it."""
        environment = clean_environment() | self.joining
        result = subprocess.run(
            [sys.executable, "-c", _STATE], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        return yaml.safe_load(result.stdout.splitlines()[-1])

    def stop(self) -> None:
        processes = [psutil.Process(node.pid) for node in self._nodes if node.poll() is None]
        children = [child for process in processes for child in process.children(recursive=True)]
        for node in reversed(self._nodes):
            node.send_signal(signal.SIGTERM)
        try:
            for node in self._nodes:
                node.wait(60)
        finally:
            _, alive = psutil.wait_procs(children, timeout=5)
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for node in self._nodes:
                node.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Paths of sockets below it must stay under 108 characters.
    with tempfile.TemporaryDirectory(prefix="interpose-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        running = Cluster(Path(folder))
        try:
            yield running.start()
        finally:
            running.stop()


def check(address: str, name: str, checkpoint: Path, key: str | None = None) -> None:
    """The workers, over gRPC, Serve and Ray, read what transformers computes."""
    with interpose.connect(address, key, progress=False) as client:
        served = Served(client, name, checkpoint, Oracle(checkpoint))
        for prompt in PROMPTS:
            check_everything(served, prompt, *read_everything(served, prompt))


def test_serve_joins_a_cluster_and_leaves_it_as_it_was(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    before = cluster.state()
    arguments = [str(checkpoints["gpt2"]), "--name", "gpt2", "--dtype", "float32", "--enforce-eager"]
    running = RunningService(tmp_path, {}, *arguments, environment=cluster.joining).wait()
    try:
        check(running.address, "gpt2", checkpoints["gpt2"])
    finally:
        status = running.stop()
    assert status == 0
    # The cluster goes on without the service.
    deadline = time.monotonic() + 30
    while cluster.state() != before:
        assert time.monotonic() < deadline, cluster.state()


def test_the_application_of_the_kubernetes_overlay_deployed_by_serve(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`serveConfigV2` of `k8s/overlays/cpu-dev` as it is, but for the path of the model and the ports, which here all three
    nodes share: an ingress replica on each, and a tensor-parallel rank on each of two."""
    config = yaml.safe_load(yaml.safe_load(OVERLAY.read_text())["spec"]["serveConfigV2"])
    config["grpc_options"]["port"] = free_port()
    config["http_options"]["port"] = free_port()
    (application,) = config["applications"]
    (settings,) = application["args"]["models"]
    settings["model"] = str(checkpoints["llama"])
    address = f"127.0.0.1:{config['grpc_options']['port']}"
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    with (tmp_path / "serve.log").open("w") as output:
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, str(file)]
        serve = subprocess.Popen(command, env=clean_environment() | cluster.joining, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with interpose.connect(address, KEY, progress=False) as client:
                    assert pod_is_ready(address)  # whatever the model does
                    if client.status().models[0].state == "RUNNING":
                        break
            except (Unavailable, DeadlineExceeded, grpc.RpcError):
                pass  # it is starting, on a machine that may be busy
            assert serve.poll() is None and time.monotonic() < deadline, (tmp_path / "serve.log").read_text()
            time.sleep(0.5)
        # All three replicas of the ingress run, as there are three nodes, and the ranks are on two.
        while (state := cluster.state())["applications"] != {"interpose": "RUNNING"}:
            assert serve.poll() is None and time.monotonic() < deadline, state
        assert (state["nodes"], state["cpus"], state["groups"]) == (3, 2.0, [2])
        check(address, settings["name"], checkpoints["llama"], KEY)
        with pytest.raises(Unauthenticated):
            interpose.connect(address, "another key", progress=False)
        run_smoke_job(address, tmp_path)
    finally:
        # Not SIGINT, which a process that was started in the background ignores.
        serve.terminate()
        serve.wait(60)


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
