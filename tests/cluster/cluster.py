"""A Ray cluster of several nodes for tests: that of docker-compose.yml, and what it takes to see whether it works."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import yaml

import interpose
from serve_app.key_hashes import hashed
from tests.e2e.service import clean_environment, free_port
from tests.e2e.test_fidelity import PROMPTS, Served, check_everything, read_everything
from tests.oracle import Oracle

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
KEY = "the key of the cluster's only tenant"

STATE = """
import json, ray
from ray import serve
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
total, free = ray.cluster_resources(), ray.available_resources()
groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps({
    "nodes": len([node for node in ray.nodes() if node["Alive"]]),
    "all_cpus": total["CPU"],
    "cpus": total["CPU"] - free.get("CPU", 0.0),
    "groups": [len(set(group["bundles_to_node_id"].values())) for group in groups],
    "placements": [group["strategy"] for group in groups],
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


def ray_start(service: str) -> list[str]:
    """The arguments of `ray start` in a service of docker-compose.yml, which has one node for each on a network."""
    command = yaml.safe_load(COMPOSE.read_text())["services"][service]["command"]
    lines = [command] if command[0] == "ray" else [shlex.split(line) for line in command[-1].splitlines()]
    (arguments,) = (line[2:] for line in lines if line[:2] == ["ray", "start"])
    return arguments


class Cluster:
    """The Ray cluster of docker-compose.yml, a head without CPUs and two workers with one each, but on this machine's loopback
    interface. It belongs to nobody under test."""

    # What keeps Ray's nodes on that interface.
    ONE_MACHINE: ClassVar[dict[str, str]] = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"{self.host('head')}:{free_port()}"
        tenants = folder / "tenants.yaml"
        keys = [str(hashed(KEY))]
        tenants.write_text(yaml.safe_dump({"tenants": [{"name": "tester", "operator": True, "api_keys": keys}]}))
        self.environment = clean_environment() | {
            **self.ONE_MACHINE,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "VLLM_RPC_BASE_PATH": str(folder),
            # As the pods have it; for what is built on the cluster, not for what joins it. The file is on the head alone.
            "INTERPOSE_TENANTS_FILE": str(tenants),
            # What docs/serving.md says of the proxy's address.
            "INTERPOSE_GRPC__HOST": self.host("head"),
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.proxy.listen_on_host",
            "PYTHONPATH": str(ROOT),
        }

    def host(self, name: str) -> str:
        """The address of a node."""
        return "127.0.0.1"

    def inside(self, name: str, command: list[str]) -> list[str]:
        """A command as it runs on a node."""
        return command

    def start(self) -> Cluster:
        for name in ("head", "worker-1", "worker-2"):
            self.start_node(name)
        return self

    def start_node(self, name: str) -> None:
        """Start a node, or start it again, as what watches over its container would."""
        port = self.address.split(":")[1]
        arguments = [word.replace("head:6379", self.address) for word in ray_start(name)]
        # Nodes of one machine share its ports; of two options with one name Ray takes the last.
        arguments += [f"--metrics-export-port={free_port()}"]
        if name == "head":
            arguments = [word.replace("--port=6379", f"--port={port}") for word in arguments]
            arguments += ["--block", f"--temp-dir={self.folder}"]
        else:
            arguments += [f"--dashboard-agent-listen-port={free_port()}"]
        command = [sys.executable, "-c", _START, "start", *arguments]
        command += [f"--node-ip-address={self.host(name)}", "--object-store-memory=200000000"]
        log = self.folder / f"{name}.log"
        with log.open("w") as output:
            node = subprocess.Popen(self.inside(name, command), env=self.environment, stdout=output, stderr=output)
        self.nodes[name] = node
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    @property
    def joining(self) -> dict[str, str]:
        """The environment of a process that joins it."""
        names = (*self.ONE_MACHINE, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        return {"RAY_ADDRESS": self.address} | {name: self.environment[name] for name in names}

    def joined(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A script in a process of its own, on the head, that joins the cluster."""
        command = self.inside("head", [sys.executable, "-c", script, *arguments])
        given = clean_environment() | self.joining | environment
        return subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=120)

    def state(self) -> dict[str, Any]:
        """How many nodes there are, CPUs in use, over how many nodes each placement group spreads and how, and what Serve runs:
        asked by a process that joins the cluster for it."""
        result = self.joined(STATE)
        assert result.returncode == 0, result.stderr
        return yaml.safe_load(result.stdout.splitlines()[-1])

    def controller_log(self) -> str:
        """The end of what Serve's controller wrote."""
        written = (self.folder / "session_latest" / "logs" / "serve").glob("controller_[0-9]*.log")
        return "".join(log.read_text()[-8000:] for log in written)

    def stop(self) -> None:
        nodes = list(self.nodes.values())
        processes = [psutil.Process(node.pid) for node in nodes if node.poll() is None]
        children = [child for process in processes for child in process.children(recursive=True)]
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
        try:
            for node in nodes:
                node.wait(60)
        finally:
            _, alive = psutil.wait_procs(children, timeout=5)
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for node in nodes:
                node.kill()

    def deploy(self, config: str, folder: Path) -> subprocess.Popen[bytes]:
        """Have Serve's own command deploy a configuration, from the head; it stays until it is told to end."""
        file = folder / "serve.yaml"
        file.write_text(config)
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", self.address, str(file)]
        with (folder / "serve.log").open("w") as output:
            environment = clean_environment() | self.joining
            return subprocess.Popen(self.inside("head", command), env=environment, stdout=output, stderr=output)


def check(address: str, name: str, checkpoint: Path, key: str | None = None) -> None:
    """The workers, over gRPC, Serve and Ray, read what transformers computes."""
    with interpose.connect(address, key, progress=False) as client:
        served = Served(client, name, checkpoint, Oracle(checkpoint))
        for prompt in PROMPTS:
            check_everything(served, prompt, *read_everything(served, prompt))
