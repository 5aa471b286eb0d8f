"""Each part of a service is killed under a client's hands, and the room for its results runs out: one service for all of it.

Its engines run eagerly, which makes them start sooner; its object store and the disk behind that are small.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import interpose
from actors.spilled import is_complete
from benchmarks.relay import Relay
from executor.cluster.shared_memory import SHARED_MEMORY
from interpose.contract.errors import InterposeError, QuotaExceeded, Unavailable
from tests.cluster.matrix import FAULTS, WORKER, Seen, There, leaks, report, shown
from tests.e2e.service import RunningService, wait_for

STORE_BYTES = 100 << 20
DISK_BYTES = 320 << 20  # more than all that is saved at a time, so that there is room again when its ballast is gone
LEFT_BYTES = 10 << 20  # that its ballast leaves, too little for a value
VALUE_BYTES = 40 << 20
STEPS = 100

# What a part that is lost could leave behind.
_LITTER = """
import sys, ray
from ray.util import placement_group
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
group, value = placement_group([{"CPU": 1}]), ray.put(bytes(2 << 20))
print("left", flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small disk of its own, for what the object store has no room for."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.fail(
            f"a disk that is full needs a file system of its own, and so the right to mount one: {mounted.stderr}"
        )
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def faulty(
    checkpoints: dict[str, Path], disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    """The service that suffers; beside the shared one, so that neither depends on when the other's tests run."""
    model = {
        "name": "llama",
        "model": str(checkpoints["llama"]),
        "tensor_parallel_size": 2,
        "engine": {"dtype": "float32", "enforce_eager": True},
    }
    # A client that goes while its ingress is replaced cannot close its session, which then ends by itself.
    settings: dict[str, object] = {"models": [model], "sessions": {"warm": 2, "idle_seconds": 30.0}}
    environment = {
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(STORE_BYTES),
        "RAY_object_spilling_directory": str(disk),
    }
    running = RunningService(tmp_path_factory.mktemp("faulty"), settings, environment=environment).wait()
    yield running
    try:
        wait_for(lambda: not running.status().sessions, 60)
        wait_for(lambda: not any(model.running or model.waiting for model in running.status().models), 20)
        wait_for(lambda: running.object_store_bytes() < 1 << 20, 60)
    finally:
        assert running.stop() == 0


@pytest.fixture
def notebook(faulty: RunningService) -> Iterator[interpose.Client]:
    """A client of it."""
    with interpose.connect(faulty.address, progress=False) as client:
        yield client


class InFlight(threading.Thread):
    """A client whose trace runs: how it ended, and when.

    Args:
        address: of the service.
        pause: seconds that its block waits in each.
    """

    def __init__(self, address: str, pause: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._pause = pause
        self._begun = threading.Event()
        self.error: InterposeError | None = None
        self.tokens: list[int] = []
        self.counted = 0  # steps that its block saw
        self.at = 0.0
        self.start()
        assert self._begun.wait(60), self.error

    def run(self) -> None:
        pause = self._pause
        try:
            with interpose.connect(self._address, progress=False) as client:
                model = client.model("llama")
                with model.trace(
                    "one two three", max_tokens=STEPS, temperature=0.0, ignore_eos=True, stream=True
                ) as tracer:
                    from time import sleep

                    counted = [].save()
                    for _step in tracer.iter[:]:
                        counted.append(1)
                        sleep(pause)
                for out in tracer.stream():
                    self._begun.set()
                    self.tokens.extend(out.new_token_ids)
                self.counted = len(counted)
        except InterposeError as error:
            self.error = error
        self.at = time.monotonic()

    def ended(self, since: float, seconds: float) -> float:
        """Wait for its end; return the seconds that it took."""
        self.join(seconds)
        assert not self.is_alive(), f"the client waits for more than {seconds:g} s"
        return self.at - since


def trace_runs(client: interpose.Client) -> bool:
    """Whether a new trace gives what it should."""
    try:
        model = client.model("llama")
        with model.trace("one two three"):
            hidden = model.model.layers[0].output[0].save()
    except Unavailable:
        return False
    return bool(hidden.shape[-1] == 128)


def kept_job(client: interpose.Client) -> interpose.Job:
    """A finished job, whose result must outlive what comes."""
    model = client.model("llama")
    with model.trace("one two three", blocking=False) as tracer:
        kept = model.model.layers[0].output[0].new_ones(99999).save()
    tracer.job.wait(timeout=60)
    assert kept.sum() == 99999
    return tracer.job


def lost(client: interpose.Client, job: interpose.Job) -> int:
    """How many finished results are gone."""
    try:
        return int(client.job(job.id).result()["kept"].sum() != 99999)
    except InterposeError:
        return 1


def kill(
    service: RunningService, client: interpose.Client, fault: str, victims: Callable[[], list[psutil.Process]]
) -> None:
    """Kill processes under a running trace and watch everything come back."""
    assert trace_runs(client)
    before = There.of(service)
    job = kept_job(client)
    running = InFlight(service.address)
    processes = victims()
    begun = time.monotonic()
    for process in processes:
        process.kill()
    saw = running.ended(begun, 60)
    assert isinstance(running.error, Unavailable), running.error
    assert saw < 20
    gone = lost(client, job)  # while the engine is away
    wait_for(lambda: trace_runs(client), 200)
    back = time.monotonic() - begun
    gone = gone or lost(client, job)
    job.forget()
    report(Seen(fault, shown(running.error), saw, back, gone, leaks(service, before)))


def runs(service: RunningService) -> int:
    """How many traces the service has begun."""
    return sum(tenant.traces_done for tenant in service.status().tenants)


@pytest.fixture(scope="module")
def alone(faulty: RunningService) -> list[int]:
    """The tokens of a trace that nothing happened to."""
    undisturbed = InFlight(faulty.address, pause=0.0)
    undisturbed.ended(time.monotonic(), 200)
    assert undisturbed.error is None and undisturbed.counted == STEPS
    return undisturbed.tokens


def test_what_is_left_is_counted(faulty: RunningService) -> None:
    """A placement group and a value of somebody who is no tenant, and a file that nobody uses."""
    before = There.of(faulty)
    assert not before.shared, "the workers' queues have no names"
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="interpose-test-") as unused:
        littered = There(before.parts, before.shared | {Path(unused.name)})
        with faulty.joining(_LITTER) as littering:
            littering.read_until("left")
            assert leaks(faulty, littered, seconds=3) == 3
    assert leaks(faulty, littered) == 0


def test_a_connection_that_breaks(faulty: RunningService, notebook: interpose.Client, alone: list[int]) -> None:
    """Three times in the middle of one trace, which its client then submits and follows again: it runs once."""
    before, done = There.of(faulty), runs(faulty)
    relay = Relay(faulty.address)
    running = InFlight(relay.address)
    for _ in range(3):
        seen = len(running.tokens)
        relay.cut()
        wait_for(lambda seen=seen: len(running.tokens) > seen or not running.is_alive(), 30)
    running.ended(time.monotonic(), 120)
    relay.close()
    assert running.error is None and running.tokens == alone and running.counted == STEPS
    assert runs(faulty) == done + 1
    report(Seen(FAULTS[1], shown(running.error), None, None, 0, leaks(faulty, before)))


def test_an_ingress_that_is_killed(faulty: RunningService, notebook: interpose.Client, alone: list[int]) -> None:
    before = There.of(faulty)
    job = kept_job(notebook)
    done = runs(faulty)
    running = InFlight(faulty.address)
    [replica] = faulty.processes("ServeReplica:interpose:ingress")
    begun = time.monotonic()
    replica.kill()
    running.ended(begun, 120)
    assert running.error is None and running.tokens == alone and running.counted == STEPS
    assert runs(faulty) == done + 1
    back = time.monotonic() - begun
    assert trace_runs(notebook)
    gone = lost(notebook, job)
    job.forget()
    report(Seen(FAULTS[2], shown(running.error), None, back, gone, leaks(faulty, before)))


def save_much(client: interpose.Client) -> interpose.Job:
    """A finished job that keeps VALUE_BYTES."""
    model = client.model("llama")
    size = VALUE_BYTES // 4
    with model.trace("one two three", blocking=False) as tracer:
        much = model.model.layers[0].output[0].new_ones(size).save()
    try:
        tracer.job.wait(timeout=120)
    except InterposeError:
        tracer.job.forget()  # or its session would keep the reason for later calls
        raise
    assert much.sum() == size
    return tracer.job


def spilled(disk: Path) -> list[Path]:
    """The files into which Ray wrote values, or tried to."""
    return [path for path in disk.rglob("*-multi-*") if path.is_file()]


def test_an_object_store_and_a_disk_that_are_full(
    faulty: RunningService, notebook: interpose.Client, disk: Path
) -> None:
    before = There.of(faulty)
    # More than the object store holds goes to the disk, and comes from there.
    jobs = [save_much(notebook) for _ in range(1 + STORE_BYTES // VALUE_BYTES)]
    assert spilled(disk)
    gone = sum(int(notebook.job(job.id).result()["much"].sum() != VALUE_BYTES // 4) for job in jobs)
    report(Seen(FAULTS[9], shown(None), None, None, gone, leaks(faulty, before)))

    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - LEFT_BYTES))
    begun = time.monotonic()
    with pytest.raises(QuotaExceeded, match="no room left for saved values") as caught:
        for _ in range(1 + STORE_BYTES // VALUE_BYTES):
            jobs.append(save_much(notebook))
    saw = time.monotonic() - begun
    assert trace_runs(notebook), "small values still come"
    gone = sum(int(notebook.job(job.id).result()["much"].sum() != VALUE_BYTES // 4) for job in jobs)
    ballast.unlink()
    begun = time.monotonic()

    def saves_again() -> bool:
        try:
            jobs.append(save_much(notebook))
        except QuotaExceeded:
            return False  # Ray looks at the disk now and then, and answers from its last look
        return True

    wait_for(saves_again, 30)
    back = time.monotonic() - begun
    for job in jobs:
        job.forget()
    report(Seen(FAULTS[10], shown(caught.value), saw, back, gone, leaks(faulty, before)))
    wait_for(lambda: all(is_complete(path) for path in spilled(disk)), 30)  # of those that failed none is left


def test_an_application_that_is_deployed_anew(
    faulty: RunningService, notebook: interpose.Client, alone: list[int]
) -> None:
    """Every replica is replaced, under a trace that takes longer than the ingress is given to finish its calls."""
    before = There.of(faulty)
    job = kept_job(notebook)
    replicas = {process.pid for process in faulty.processes("ServeReplica:interpose:")}
    done = runs(faulty)
    running = InFlight(faulty.address, pause=0.12)
    begun = time.monotonic()
    faulty.joined("import sys; from benchmarks.redeploy import main; main(sys.argv[1])", str(faulty.config))
    running.ended(begun, 200)
    assert running.error is None and running.tokens == alone and running.counted == STEPS
    assert runs(faulty) == done + 1
    gone = lost(notebook, job)

    def replaced() -> bool:
        now = {process.pid for process in faulty.processes("ServeReplica:interpose:")}
        return len(now) == len(replicas) and not now & replicas

    wait_for(replaced, 120)
    wait_for(lambda: trace_runs(notebook), 200)
    back = time.monotonic() - begun
    gone = gone or lost(notebook, job)
    job.forget()
    report(Seen(FAULTS[11], shown(running.error), None, back, gone, leaks(faulty, before)))


def test_a_worker_that_is_killed(faulty: RunningService, notebook: interpose.Client) -> None:
    kill(faulty, notebook, FAULTS[4], lambda: faulty.processes(WORKER)[1:2])


def test_an_engine_replica_that_is_killed(faulty: RunningService, notebook: interpose.Client) -> None:
    kill(faulty, notebook, FAULTS[6], lambda: faulty.processes("ServeReplica:interpose:engine-llama"))
