"""On a Ray cluster that runs already: `interpose serve` joins it, and Serve's own command deploys the application to it."""

from __future__ import annotations

import contextlib
import json
import secrets
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
OVERLAY = ROOT / "k8s" / "overlays" / "cpu-dev" / "serve.yaml"
RAYSERVICE = ROOT / "k8s" / "base" / "rayservice.yaml"
SMOKE_JOB = ROOT / "k8s" / "smoke" / "job.yaml"
KEY = "the key of the cluster's only tenant"

_STATE = """
import json, ray
from ray.util.state import list_actors
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
total, free = ray.cluster_resources(), ray.available_resources()
groups = ray.util.placement_group_table().values()
print(json.dumps({
    "cpus": total["CPU"] - free.get("CPU", 0.0),
    "groups": [group["state"] for group in groups if group["state"] != "REMOVED"],
}))
"""

pytestmark = pytest.mark.timeout(500)


class Head:
    """A Ray head that belongs to nobody under test, on this machine's loopback interface."""

    def __init__(self, folder: Path) -> None:
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
        arguments = ["--head", "--block", "--node-ip-address=127.0.0.1", f"--port={self.address.split(':')[1]}"]
        arguments += [
            "--num-cpus=4",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
            "--object-store-memory=200000000",
        ]
        self._output = folder / "head.log"
        with self._output.open("w") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments],
                env=self.environment,
                stdout=output,
                stderr=output,
            )

    @property
    def joining(self) -> dict[str, str]:
        """The environment of a process that joins it."""
        names = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        return {"RAY_ADDRESS": self.address} | {name: self.environment[name] for name in names}

    def wait(self) -> Head:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in self._output.read_text():
            assert self._popen.poll() is None and time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.2)
        return self

    def state(self) -> dict[str, Any]:
        """CPUs in use and placement groups, asked by a process that joins the cluster for it."""
        environment = clean_environment() | self.joining
        result = subprocess.run(
            [sys.executable, "-c", _STATE], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return yaml.safe_load(result.stdout.splitlines()[-1])

    def stop(self) -> None:
        children = psutil.Process(self._popen.pid).children(recursive=True)
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(60)
        finally:
            _, alive = psutil.wait_procs(children, timeout=20)
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._popen.kill()


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # Paths of sockets below it must stay under 108 characters.
    with tempfile.TemporaryDirectory(prefix="interpose-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        running = Head(Path(folder))
        try:
            yield running.wait()
        finally:
            running.stop()


def check(address: str, name: str, checkpoint: Path, key: str | None = None) -> None:
    """The workers, over gRPC, Serve and Ray, read what transformers computes."""
    with interpose.connect(address, key, progress=False) as client:
        served = Served(client, name, checkpoint, Oracle(checkpoint))
        for prompt in PROMPTS:
            check_everything(served, prompt, *read_everything(served, prompt))


def test_serve_joins_a_cluster_and_leaves_it_as_it_was(
    head: Head, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    before = head.state()
    arguments = [str(checkpoints["gpt2"]), "--name", "gpt2", "--dtype", "float32"]
    running = RunningService(tmp_path, {}, *arguments, environment=head.joining).wait()
    try:
        check(running.address, "gpt2", checkpoints["gpt2"])
    finally:
        status = running.stop()
    assert status == 0
    # The cluster goes on without the service.
    deadline = time.monotonic() + 30
    while head.state() != before:
        assert time.monotonic() < deadline, head.state()


def test_the_application_of_the_kubernetes_overlay_deployed_by_serve(
    head: Head, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`serveConfigV2` of `k8s/overlays/cpu-dev` as it is, but for the path of the model and the ports. It asks for one ingress
    replica on each of three pods; here is one node, where one of them runs."""
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
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", head.address, str(file)]
        serve = subprocess.Popen(command, env=clean_environment() | head.joining, stdout=output, stderr=output)
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
