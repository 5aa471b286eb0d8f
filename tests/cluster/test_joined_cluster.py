"""On a Ray cluster that runs already: `interpose serve` joins it, and Serve's own command deploys the application to it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

import interpose
from interpose.contract.errors import DeadlineExceeded, Unauthenticated, Unavailable
from tests.cluster.cluster import KEY, Cluster, check
from tests.cluster.overlay import overlay, pod_is_ready, run_smoke_job
from tests.e2e.service import START_SECONDS, RunningService, free_port

_PLACE = """
import sys, ray
from vllm.engine.arg_utils import AsyncEngineArgs
from executor.cluster import placement as cluster
from executor.engine.options import engine_options
from serve_app.settings import ModelSettings

checkpoint, placement, cluster.WAIT_SECONDS = sys.argv[1], sys.argv[2], float(sys.argv[3])
cluster.connect()
model = ModelSettings(model=checkpoint, tensor_parallel_size=2, placement=placement)
config = AsyncEngineArgs(**engine_options(model)).create_engine_config()
table = ray.util.placement_group_table(cluster.placement_group_for(config, "CPU"))
print(table["strategy"], len(set(table["bundles_to_node_id"].values())))
"""
_LOOK = """
import ray
ray.init(address="auto", log_to_driver=False)
print(ray.nodes())
"""

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Paths of sockets below it must stay under 108 characters.
    with tempfile.TemporaryDirectory(prefix="interpose-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        running = Cluster(Path(folder))
        try:
            yield running.start()
        finally:
            running.stop()


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


def test_an_engine_without_a_replica_is_placed_as_its_settings_say(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """On two nodes with one CPU each."""
    placed = cluster.joined(_PLACE, str(checkpoints["llama"]), "STRICT_SPREAD", "60")
    assert placed.returncode == 0, placed.stderr
    assert placed.stdout.splitlines()[-1] == "STRICT_SPREAD 2"
    packed = cluster.joined(_PLACE, str(checkpoints["llama"]), "STRICT_PACK", "3")
    assert packed.returncode and "no room for 2 workers with one CPU each, placed STRICT_PACK" in packed.stderr


@pytest.mark.parametrize("other", [{"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}])
def test_who_has_not_the_clusters_token_does_not_get_in(cluster: Cluster, other: dict[str, str]) -> None:
    assert cluster.joined(_LOOK).returncode == 0
    refused = cluster.joined(_LOOK, **other)
    assert refused.returncode and "Failed to connect to Ray cluster" in refused.stderr and not refused.stdout, refused


def test_the_application_of_the_kubernetes_overlay_deployed_by_serve(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`serveConfigV2` of `k8s/overlays/cpu-dev`, but for the path of the model, its placement, and the ports, which here
    all three nodes share: an ingress replica on each, and a tensor-parallel rank on each of two.

    `test_partition` has it to the letter.
    """
    config, settings = overlay()
    settings["model"] = str(checkpoints["llama"])
    settings["placement"] = "STRICT_SPREAD"
    config["grpc_options"]["port"] = free_port()
    config["http_options"]["port"] = free_port()
    address = f"127.0.0.1:{config['grpc_options']['port']}"
    serve = cluster.deploy(yaml.safe_dump(config), tmp_path)
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
        assert state["placements"] == ["STRICT_SPREAD"]
        check(address, settings["name"], checkpoints["llama"], KEY)
        assert not keys_in_workers(address)
        with pytest.raises(Unauthenticated):
            interpose.connect(address, "another key", progress=False)
        run_smoke_job(address, tmp_path)
    finally:
        # Not SIGINT, which a process that was started in the background ignores.
        serve.terminate()
        serve.wait(60)


def keys_in_workers(address: str) -> list[str]:
    """Which of the variables with tenants' keys, which every node of the cluster has, a block finds."""
    with interpose.connect(address, KEY, progress=False) as client:
        with client.model().trace("one two three"):
            found = [name for name in os.environ if "TENANTS" in name].save()
    return list(found)
