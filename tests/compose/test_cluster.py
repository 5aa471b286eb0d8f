"""The cluster of docker-compose.yml from its start to its end: each test goes on where the one before it stopped."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import interpose
from tests.compose.cluster import START_SECONDS, Cluster, answers, until

# Engines start several times, on as many cores as there are.
pytestmark = pytest.mark.timeout(3600)

NODES = ("head", "worker-1", "worker-2")
WORKERS = ("worker-1", "worker-2")
# Of vLLM's workers, as `ps` shows them.
RANK = re.compile(r"^ray::.*Worker")
BACK_SECONDS = 300.0
PROMPT = "The Eiffel Tower is in"


def ranks(cluster: Cluster, service: str) -> list[str]:
    return [line for line in cluster.processes(service) if RANK.match(line)]


def all_healthy(cluster: Cluster) -> bool:
    return all(cluster.inspect(node)["State"].get("Health", {}).get("Status") == "healthy" for node in NODES)


def comes_back(cluster: Cluster, what: str, within: float = BACK_SECONDS) -> None:
    """A trace works again, with a rank on each worker, and every container is healthy."""
    try:
        seconds = until(lambda: answers(cluster), within, f"a trace after {what}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cluster.logs()}") from None
    print(f"after {what}: a trace works after {seconds:.0f} s", flush=True)
    assert [len(ranks(cluster, worker)) for worker in WORKERS] == [1, 1]
    until(lambda: all_healthy(cluster), 120, "every container is healthy")


def test_a_trace_works_with_a_rank_in_each_workers_container(cluster: Cluster) -> None:
    for worker in WORKERS:
        shown = ranks(cluster, worker)
        print(f"{worker}: {shown}")
        assert len(shown) == 1
    assert ranks(cluster, "head") == []
    until(lambda: all_healthy(cluster), 120, "every container is healthy")


def test_sampling_and_logprobs_need_no_compiler(cluster: Cluster) -> None:
    """Parts of vLLM's sampler are compiled also in engines that are eager, where torch's compiler is on."""
    with cluster.client() as client:
        model = client.model()
        with model.trace(PROMPT, max_tokens=3, temperature=0.9, top_k=5, top_p=0.9, seed=1, logprobs=2) as tracer:
            result = tracer.result.save()
        assert len(result.token_ids) == 3 and len(result.logprobs) == 3


def test_without_a_key_nobody_comes_in(cluster: Cluster) -> None:
    with pytest.raises(interpose.Unauthenticated):
        interpose.connect(cluster.address, api_key="another", progress=False).model()


def test_only_the_clients_port_is_published_and_only_to_this_machine(cluster: Cluster) -> None:
    port = cluster.address.split(":")[1]
    assert cluster.inspect("head")["NetworkSettings"]["Ports"] == {
        "9000/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}]
    }
    for worker in WORKERS:
        assert not any((cluster.inspect(worker)["NetworkSettings"]["Ports"] or {}).values())


def test_a_node_runs_without_privileges(cluster: Cluster) -> None:
    for node in NODES:
        status = dict(line.split(":\t", 1) for line in cluster.inside(node, "cat", "/proc/self/status").splitlines())
        assert status["Uid"].split() == ["1000"] * 4
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
        for folder in ("/opt/interpose", "/home/interpose", "/usr"):
            script = f"test ! -w {folder} && ! touch {folder}/x 2>/dev/null && touch /tmp/x"
            cluster.inside(node, "sh", "-ec", script)


def test_ray_takes_nobody_without_the_token(cluster: Cluster) -> None:
    ask = "timeout 60 ray status --address=head:6379"
    assert "node" in cluster.inside("worker-1", "bash", "-c", ask)
    refused = cluster.inside(
        "worker-1", "bash", "-c", f"unset RAY_AUTH_TOKEN_PATH; RAY_AUTH_TOKEN=00 {ask} 2>&1 || true"
    )
    assert "nauthenticated" in refused or "nvalid" in refused, refused


def test_a_worker_whose_processes_are_killed_comes_back_by_itself(cluster: Cluster) -> None:
    restarts = cluster.inspect("worker-1")["RestartCount"]
    (container,) = cluster.containers("worker-1")
    # All but the first process, which ends then. Nobody waits for the shell: the end of the container may end it too.
    cluster.docker("exec", "--detach", container, "bash", "-c", "kill -9 -1")
    until(lambda: cluster.inspect("worker-1")["RestartCount"] > restarts, 120, "worker-1 is started again")
    comes_back(cluster, "SIGKILL of all processes of worker-1")


def test_a_killed_container_is_started_again_by_up(cluster: Cluster) -> None:
    """Docker restarts no container that `docker kill` or `docker stop` has ended."""
    (container,) = cluster.containers("worker-2")
    cluster.docker("kill", container)
    assert not cluster.inspect("worker-2")["State"]["Running"]
    cluster.compose("up", "--detach", "--no-recreate")
    assert cluster.containers("worker-2") == [container]
    comes_back(cluster, "docker kill of worker-2 and docker compose up")


def test_a_rolling_restart(cluster: Cluster) -> None:
    """Values on the server outlast workers, and not the head."""
    with cluster.client() as client:
        model = client.model()
        with model.trace(PROMPT, max_tokens=1, fetch=False):
            hidden = model.model.layers[0].output[0].save()
        for worker in WORKERS:
            cluster.compose("restart", "--timeout", "40", worker)
            comes_back(cluster, f"restart of {worker}")
        kept = np.asarray(hidden.fetch())
        assert kept.shape[0] > 1 and np.isfinite(kept).all()
        cluster.compose("restart", "--timeout", "40", "head")
        comes_back(cluster, "restart of the head", START_SECONDS)  # all that `up` starts is started again
        with pytest.raises(interpose.InterposeError) as lost:
            hidden[0].fetch()
        print(f"a value from before the head's restart: {type(lost.value).__name__}: {lost.value}")


def test_down_leaves_nothing(cluster: Cluster) -> None:
    before = [process for node in NODES for process in pids(cluster, node)]
    assert before
    start = time.monotonic()
    cluster.down()
    assert cluster.left() == []
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), 30, "the containers' processes end")
    print(f"docker compose down: nothing is left after {time.monotonic() - start:.0f} s", flush=True)
    probe = subprocess.run(
        [sys.executable, "examples/smoke.py", "--wait", "0", "--address", cluster.address], check=False
    )
    assert probe.returncode == 1


def pids(cluster: Cluster, node: str) -> list[int]:
    """The processes of a node, which runs, by the ids that they have on this machine."""
    (container,) = cluster.containers(node)
    return [int(line.split()[0]) for line in cluster.docker("top", container, "-eo", "pid").splitlines()[1:]]
