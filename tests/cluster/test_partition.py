"""Three Ray nodes on a network of their own, a tensor-parallel rank on each of two, and a client on a fourth host: what it
reads is what transformers computes; a node that is cut off, and one that dies, end its trace within seconds, and it can go on.

The hosts are namespaces with addresses, processes and shared memory of their own. What was lost comes back as a container does
that is restarted: no third node takes over.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml

from benchmarks.processes import ENGINE, title
from tests.cluster.cluster import COMPOSE, KEY, ROOT, Cluster
from tests.cluster.matrix import FAULTS, Seen, report
from tests.cluster.namespaces import Network
from tests.cluster.overlay import overlay, serve_config
from tests.e2e.service import START_SECONDS, clean_environment, wait_for

NODES = ("head", "worker-1", "worker-2")
# What a user may have to wait, where an engine starts within half of the second.
ERROR_SECONDS = 10.0
RECOVERY_SECONDS = 90.0
ENGINE_SECONDS = 45.0
# When the cable is put in again: Ray has given the node up then.
CUT_SECONDS = 12.0

pytestmark = pytest.mark.timeout(900)

_STOP_SERVE = """
import ray
from ray import serve
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
serve.shutdown()
"""

# What the directory frees on each node, where something was left that is 1 MiB and not whole, and whether it is still there.
_MAKE_ROOM = """
import json
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address="auto", namespace="interpose", log_to_driver=False, logging_level="ERROR", configure_logging=False)

def left():
    from actors.spilled import _of_this_node
    return _of_this_node()._folder / ("f" * 32 + "-multi-1")

@ray.remote(num_cpus=0)
def litter():
    left().parent.mkdir(parents=True, exist_ok=True)
    left().write_bytes(b"\\xff" * (1 << 20))

@ray.remote(num_cpus=0)
def there():
    return left().exists()

directory, found = ray.get_actor("interpose-directory"), []
for node in ray.nodes():
    here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    ray.get(litter.options(scheduling_strategy=here).remote())
    freed = ray.get(directory.make_room.remote(node["NodeID"]))
    still = ray.get(there.options(scheduling_strategy=here).remote())
    found.append(["node:__internal_head__" in node["Resources"], freed, still])
print(json.dumps(sorted(found)))
"""


class SpreadCluster(Cluster):
    """The cluster of docker-compose.yml, with its environment, each node on a host of its own.

    Args:
        volumes: folders of this machine, by where the nodes have them.
    """

    ONE_MACHINE: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: Path, network: Network, volumes: dict[Path, Path]) -> None:
        self._network = network
        self._volumes = volumes
        super().__init__(folder)
        compose = yaml.safe_load(COMPOSE.read_text())["x-environment"]
        self.environment |= {name: value for name, value in compose.items() if name.startswith("RAY_health_check")}
        # Its proxies listen for clients of the network, and each node has one.
        self.environment["INTERPOSE_GRPC__HOST"] = "0.0.0.0"

    def host(self, name: str) -> str:
        return self._network.addresses[name]

    def inside(self, name: str, command: list[str]) -> list[str]:
        return self._network.inside(name, command, str(ROOT))

    def start_node(self, name: str) -> None:
        # Ray's nodes keep what is theirs in a folder that has the same name on all of them.
        self._network.start(name, [] if name == "head" else [str(self.folder)], self._volumes)
        super().start_node(name)

    def restart_node(self, name: str) -> None:
        """Wait until a node has given up, as it does when the cluster has gone on without it, and start it again."""
        self.nodes[name].wait(120)
        self._network.stop(name)
        self.start_node(name)

    def stop(self) -> None:
        for name in NODES:
            self._network.stop(name)
        for node in self.nodes.values():
            node.wait(30)


class Client:
    """The process of `partition_client`, on its host."""

    def __init__(self, network: Network, address: str, name: str, checkpoint: Path) -> None:
        network.start("client")
        command = [sys.executable, "-m", "tests.cluster.partition_client", address, KEY, name, str(checkpoint)]
        environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
        inside = network.inside("client", command, str(ROOT))
        self._process = subprocess.Popen(
            inside, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self) -> None:
        """Have it go through one fault."""
        assert self._process.stdin is not None
        self._process.stdin.write("next\n")
        self._process.stdin.flush()

    def told(self, what: str, seconds: float) -> dict[str, Any]:
        """The next thing that it tells."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"the client has not told {what!r} within {seconds:g} s") from None
        assert line, f"the client ended instead of telling {what!r}"
        told = json.loads(line)
        assert told["what"] == what, told
        return dict(told)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.told("checked", 300)
        assert self._process.wait(60) == 0

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(f"ip{secrets.token_hex(2)}", [*NODES, "client", "operator"])
    try:
        made.make()
    except RuntimeError as error:
        pytest.fail(str(error))
    yield made
    made.remove()


@pytest.fixture(scope="module")
def spread(network: Network, checkpoints: dict[str, Path]) -> Iterator[tuple[SpreadCluster, Client, float]]:
    """The cluster with `serveConfigV2` of `k8s/overlays/cpu-dev` to the letter, a client that has found everything right, and the
    seconds that the engine took to start. The nodes have the model where the pods have it."""
    # Paths of sockets below it must stay under 108 characters.
    with tempfile.TemporaryDirectory(prefix="interpose-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        config, settings = overlay()
        cluster = SpreadCluster(Path(folder), network, {Path(settings["model"]): checkpoints["llama"]})
        try:
            cluster.start()
            begun = time.time()
            cluster.deploy(serve_config(), Path(folder))
            address = f"{cluster.host('head')}:{config['grpc_options']['port']}"
            client = Client(network, address, settings["name"], checkpoints["llama"])
            try:
                started = client.told("served", START_SECONDS)["at"] - begun
                client.told("checked", 300)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{(Path(folder) / 'serve.log').read_text()[-8000:]}") from None
            yield cluster, client, started
        finally:
            network.stop("client")
            cluster.stop()


def nodes_with(network: Network, part: str) -> list[str]:
    """The nodes on which a process of that name runs, one for each process."""
    found = []
    for name in NODES:
        for process in network.processes(name):
            with contextlib.suppress(psutil.Error):
                if part in title(process):
                    found.append(name)
    return found


@dataclass(frozen=True)
class Placed:
    """Where the model is.

    Attributes:
        engine: the node of the engine, and of one rank.
        other: the node of the other rank.
    """

    engine: str
    other: str

    @classmethod
    def on(cls, network: Network) -> Placed:
        """Look for it."""
        [engine], ranks = nodes_with(network, ENGINE), nodes_with(network, "LazyWorkerActor")
        assert sorted(ranks) == ["worker-1", "worker-2"] and engine in ranks
        [other] = {*ranks} - {engine}
        return cls(engine, other)


def whole(cluster: Cluster) -> bool:
    """Whether all nodes are there, the ranks on two, and an ingress on each."""
    state = cluster.state()
    there = state["nodes"], state["cpus"], state["groups"], state["applications"]
    return there == (3, 2.0, [2], {"interpose": "RUNNING"})


def lose(
    spread: tuple[SpreadCluster, Client, float],
    network: Network,
    fault: str,
    break_it: Callable[[Placed], None],
    mend: Callable[[Placed], None],
) -> None:
    """Break something under a running trace, mend it as an orchestrator would, and see the service come back by itself."""
    cluster, client, started = spread
    client.begin()
    running = client.told("running", 120)
    # Nothing has been broken since all was there.
    assert not running["refused"], f"{running['refused']}\n{cluster.controller_log()}"
    # Only now is it certain that there is an engine.
    placed = Placed.on(network)
    begun = time.time()
    break_it(placed)
    mending = threading.Thread(target=mend, args=(placed,))
    mending.start()
    ended = client.told("ended", 60)
    saw = ended["at"] - begun
    assert ended["retryable"], ended
    assert saw < ERROR_SECONDS, ended
    back = client.told("back", 300)["at"] - begun
    gone = client.told("looked", 60)["lost"]
    mending.join(120)
    slower = max(0.0, started - ENGINE_SECONDS)
    assert back < RECOVERY_SECONDS + slower, f"{back} s; at first the engine took {started} s"
    wait_for(lambda: whole(cluster), 60)

    def left() -> int:
        there = {part: len(nodes_with(network, part)) for part in ("LazyWorkerActor", ENGINE, "ray::Directory")}
        return max(0, there["LazyWorkerActor"] - 2) + max(0, there[ENGINE] - 1) + max(0, there["ray::Directory"] - 1)

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not left(), 60)
    report(Seen(fault, ended["saw"], saw, back, gone, left()))


def test_the_numbers_are_those_of_one_node(network: Network, spread: tuple[SpreadCluster, Client, float]) -> None:
    """The client has compared them with transformers, as the tests on one node do. Results are where no worker is."""
    wait_for(lambda: whole(spread[0]), 60)
    assert nodes_with(network, "ray::Directory") == ["head"]
    assert set(nodes_with(network, "ray::Session")) == {"head"}


def test_what_failed_writes_leave_is_removed_on_every_node(spread: tuple[SpreadCluster, Client, float]) -> None:
    made = spread[0].joined(_MAKE_ROOM)
    assert made.returncode == 0, made.stderr
    *workers, [on_the_head, freed, there] = json.loads(made.stdout.splitlines()[-1])
    assert workers == [[False, 1 << 20, False]] * 2
    # There the directory looks by itself too.
    assert on_the_head and not there and freed in (0, 1 << 20)


def test_a_node_that_is_cut_off(network: Network, spread: tuple[SpreadCluster, Client, float]) -> None:
    """The node of one rank; the engine's own and the other rank's stay."""

    def mend(placed: Placed) -> None:
        time.sleep(CUT_SECONDS)
        network.mend(placed.other)
        spread[0].restart_node(placed.other)

    lose(spread, network, FAULTS[7], lambda placed: network.cut(placed.other), mend)


def test_a_node_that_dies(network: Network, spread: tuple[SpreadCluster, Client, float]) -> None:
    """The node of the engine itself, all of it at once."""
    lose(
        spread,
        network,
        FAULTS[8],
        lambda placed: network.stop(placed.engine),
        lambda placed: spread[0].restart_node(placed.engine),
    )


def test_the_numbers_are_still_right(spread: tuple[SpreadCluster, Client, float]) -> None:
    """Compared with transformers once more, after all that."""
    spread[1].end()


def test_a_host_that_is_no_node_serves_on_the_cluster(
    network: Network, spread: tuple[SpreadCluster, Client, float], checkpoints: dict[str, Path]
) -> None:
    """`interpose serve` there joins with a node that has no CPU, so that its worker is on another, and leaves nothing."""
    cluster = spread[0]
    environment = clean_environment() | cluster.joining | {"PYTHONPATH": str(ROOT)}
    stopped = cluster.joined(_STOP_SERVE)
    assert stopped.returncode == 0, stopped.stderr
    wait_for(lambda: cluster.state()["cpus"] == 0, 60)
    network.start("operator", [str(cluster.folder)])
    before = network.processes("operator")
    command = [sys.executable, "-m", "tests.cluster.partition_operator", cluster.host("head"), str(checkpoints["gpt2"])]
    done = subprocess.run(
        network.inside("operator", command, str(ROOT)), env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == 0
    assert (told["served"]["nodes"], told["served"]["all_cpus"], told["served"]["cpus"]) == (4, 2.0, 1.0)
    assert nodes_with(network, "LazyWorkerActor") == []
    assert network.processes("operator") == before
    wait_for(lambda: cluster.state()["nodes"] == 3, 60)
