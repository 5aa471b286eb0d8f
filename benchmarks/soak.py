"""Runs mixed clients for minutes while parts of the service are lost.

    python -m benchmarks.soak --minutes 20

serves a small model and runs the crowd of `benchmarks.stress` against it. Every `--every` seconds there is a random fault: a part
is killed, half of the clients lose their connections, a client is killed, or Serve deploys the application anew. Faults that take
the engine along come only while the engine runs, so that there is something to lose. They do not come in the last share of the
time (`--spare`), so that the engine lives long enough for its memory to be seen. A trace that a fault ends must end with an error
that says so. Every other trace must give what it gives alone. The exit status is 1 if a trace did not, if the service does
not come back, or if the memory of a process grew. A share of the clients are strangers, whose blocks run in sandboxes; the client
that is killed is a stranger too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

import interpose
from benchmarks import processes, tenants
from benchmarks.relay import Relay
from benchmarks.served import Service
from benchmarks.stress import CASES, CLIENTS, ENGINE, IDLE_SECONDS, Crowd, Report, cases, left_behind, outcome_of
from interpose.contract.errors import InterposeError
from interpose.v1.service_pb2 import StatusReply

TRACES = 24
SAMPLE_SECONDS = 5.0
RECOVERY_SECONDS = 300.0
DEPLOY_SECONDS = 300.0  # until a process that imports Serve on a busy machine has told it
# A killed client cannot close its session, which then ends by itself.
SESSIONS = {"idle_seconds": 30.0}
# The growth that a process may have between the third quarter of its life and the last. It applies to processes that lived for
# five minutes: Ray's and the engine's processes take two or three until all of their threads have allocated their memory.
GROWTH = 0.05
GROWTH_BYTES = 16 << 20
LIFE_SECONDS = 300.0
_MIB = 1 << 20

# Errors of a trace when a part that it needed was killed.
LOST = ("Unavailable", "ConnectionLost")

ZYGOTE, SANDBOXED = "a sandbox's zygote", "a sandboxed process"  # as names of processes
# Parts that are killed, by a part of the process's name.
VICTIMS = {
    "the ingress": "ServeReplica:interpose:ingress",
    "a session actor": "ray::Session",
    "a worker": "LazyWorkerActor",
    "the engine core": processes.ENGINE,
    "the engine replica": "ServeReplica:interpose:engine-llama",
    "a zygote": ZYGOTE,
}
DEPLOYED = "Serve deploys anew"
TAKES_ENGINE = ("a worker", "the engine core", "the engine replica", DEPLOYED)


@dataclass
class Memory:
    """The private memory of one process over its life, bytes by seconds.

    Shared memory is left out: the part of the object store that a process has mapped says nothing of what it keeps.
    """

    name: str
    samples: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds that the process was seen."""
        return self.samples[-1][0] - self.samples[0][0]

    @property
    def growth(self) -> tuple[float, float]:
        """Medians of the memory in the third quarter and in the last quarter."""
        quarter = max(1, len(self.samples) // 4)
        first, last = self.samples[2 * quarter : 3 * quarter] or self.samples, self.samples[-quarter:]
        return statistics.median(size for _, size in first), statistics.median(size for _, size in last)

    @property
    def flat(self) -> bool:
        """Whether the memory stayed as it was."""
        first, last = self.growth
        return last <= first * (1 + GROWTH) + GROWTH_BYTES


class Watch:
    """The processes of a service: samples their memory, and kills one now and then."""

    def __init__(self, service: psutil.Process) -> None:
        self._service = service
        self._seen: dict[tuple[int, float], Memory] = {}

    def processes(self) -> dict[psutil.Process, str]:
        """All processes of the service, with their names."""
        found: dict[psutil.Process, str] = {}
        all_of_it = [self._service, *self._service.children(recursive=True)]
        zygotes, sandboxed = processes.zygotes(all_of_it)
        found |= dict.fromkeys(zygotes, ZYGOTE) | dict.fromkeys(sandboxed, SANDBOXED)
        for process in all_of_it:
            if process in found:
                continue
            with contextlib.suppress(psutil.Error):
                command = process.cmdline() or [process.name()]
                engine = processes.ENGINE in processes.title(process)
                name = command[0].rpartition("/")[2].partition(".")[0]  # without the method that an actor runs
                found[process] = processes.ENGINE if engine else name[:60]
        return found

    def sample(self) -> None:
        """Note the memory of each process."""
        for process, name in self.processes().items():
            with contextlib.suppress(psutil.Error):
                key = process.pid, process.create_time()
                memory = self._seen.setdefault(key, Memory(name))
                memory.name = name  # a process that Ray has kept idle gets its name later
                info = process.memory_info()
                memory.samples.append((time.monotonic(), info.rss - info.shared))

    def kill(self, name: str, rng: random.Random) -> bool:
        """Kill a process with this part in its name; return whether there was one."""
        found = [process for process, full in self.processes().items() if name in full]
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(found).kill()
        return bool(found)

    def series(self) -> list[dict[str, object]]:
        """Return the private memory of each process, in MiB by seconds since the first sample.

        The processes are in the order in which they came.
        """
        lives = [one for one in self._seen.values() if one.samples]
        first = min((one.samples[0][0] for one in lives), default=0.0)
        return [
            {"name": one.name, "MiB": [(round(at - first), round(size / _MIB, 1)) for at, size in one.samples]}
            for one in lives
        ]

    @property
    def lived(self) -> list[Memory]:
        """The processes that lived long enough to compare."""
        return [one for one in self._seen.values() if one.samples and one.seconds >= LIFE_SECONDS]


class Victim:
    """A client in a process of its own; after it is killed, another takes its place.

    Args:
        address: address of the service.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._process = self._start()

    def kill(self) -> bool:
        """Kill the client in the middle of its work; return whether it still lived."""
        there = self._process.poll() is None
        self.close()
        self._process = self._start()
        return there

    def close(self) -> None:
        """End the client."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.stress", "--address", self._address]
        return subprocess.Popen(
            [*command, "--seconds", "86400", "--traces", "2"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "INTERPOSE_API_KEY": tenants.STRANGERS},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


class Faults(threading.Thread):
    """Causes faults one after another.

    Args:
        causes: functions by name; each returns whether there was something to lose.
        client: a client of the service.
        every: seconds from one fault to the next.
        spare_at: when faults that take the engine end, by `time.monotonic`.
        seed: seed of the random order.

    Attributes:
        caused: how often each fault was caused.
        recoveries: seconds until the engine ran again, after each loss.
    """

    def __init__(
        self,
        causes: dict[str, Callable[[random.Random], bool]],
        client: interpose.Client,
        every: float,
        spare_at: float,
        seed: int,
    ) -> None:
        super().__init__()
        self._causes = causes
        self._client = client
        self._every = every
        self._spare_at = spare_at
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self.caused: Counter[str] = Counter()
        self.recoveries: list[float] = []

    def run(self) -> None:
        lost_at = 0.0
        following = time.monotonic() + self._every
        while not self._ended.wait(0.5):
            runs = _runs(self._client)
            if lost_at and runs and time.monotonic() - lost_at > 10:  # by then all parts have noticed the loss
                self.recoveries.append(time.monotonic() - lost_at)
                lost_at = 0.0
            if time.monotonic() < following:
                continue
            following = time.monotonic() + self._every
            spared = not runs or lost_at or time.monotonic() > self._spare_at
            name = self._rng.choice([name for name in self._causes if not (spared and name in TAKES_ENGINE)])
            there = self._causes[name](self._rng)
            print(f"  {time.strftime('%H:%M:%S')} {name}{'' if there else ': there was nothing to lose'}", flush=True)
            if there:
                self.caused[name] += 1
                if name in TAKES_ENGINE:
                    lost_at = time.monotonic()

    def end(self) -> None:
        """Cause no more faults, and wait for the current one."""
        self._ended.set()
        self.join()


def soak(minutes: float, every: float, spare: float, traces: int, seed: int) -> tuple[Report, Faults, Watch]:
    """Run the soak; return the outcome of the traces, the faults, and the processes."""
    with contextlib.ExitStack() as stack:
        service = Service(2, CLIENTS, {**ENGINE, "enforce_eager": True}, sessions=SESSIONS, tenants=tenants.TENANTS)
        stack.callback(service.close)
        address = service.address()
        sandboxes = tenants.sandboxes(service.process)
        observer = stack.enter_context(interpose.connect(address, tenants.LAB, progress=False))
        before = observer.status()
        connected = stack.enter_context(contextlib.ExitStack())
        relay = Relay(address)
        stack.callback(relay.close)
        ways = [relay.address if number % 2 else address for number in range(CLIENTS)]
        keys = tenants.keys(CLIENTS, tenants.SHARE)
        clients = [
            connected.enter_context(interpose.connect(way, key, progress=False))
            for way, key in zip(ways, keys, strict=True)
        ]
        models = [client.model() for client in clients]
        known = [(case, outcome_of(models[0], case)) for case in cases(seed, CASES)]
        crowd = Crowd(models, known, lost=LOST)
        watch = Watch(service.process)
        victim = Victim(address)
        connected.callback(victim.close)
        causes: dict[str, Callable[[random.Random], bool]] = {
            name: partial(watch.kill, title) for name, title in VICTIMS.items()
        }
        causes |= {
            "a client is killed": lambda _: victim.kill(),
            "connections break": lambda _: relay.cut(),
            DEPLOYED: lambda _: _deploy(service),
        }
        faults = Faults(causes, clients[0], every, time.monotonic() + minutes * 60 * (1 - spare), seed)
        ended = threading.Event()
        sampler = threading.Thread(target=_sample, args=(watch, ended))
        for thread in (faults, sampler):
            thread.start()
        try:
            report = crowd.run(minutes * 60, traces)
        finally:
            faults.end()
            ended.set()
            sampler.join()
        report.wrong.extend(_afterwards(observer, before, connected))
        report.wrong.extend(tenants.left(service.process, sandboxes, IDLE_SECONDS))
    return report, faults, watch


def _sample(watch: Watch, ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_SECONDS):
        watch.sample()


def _deploy(service: Service) -> bool:
    """Make Serve replace every replica; return whether Serve was told."""
    command = [sys.executable, "-m", "benchmarks.redeploy", str(service.config)]
    environment = processes.joining(service.process.children(recursive=True))
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, timeout=DEPLOY_SECONDS
    )
    return done.returncode == 0


def _runs(client: interpose.Client) -> bool:
    try:
        return all(model.state == "RUNNING" for model in client.status().models)
    except InterposeError:
        return False


def _afterwards(observer: interpose.Client, before: StatusReply, connected: contextlib.ExitStack) -> list[str]:
    """Return what is wrong when the clients have gone and everything has had its time."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while not _runs(observer):
        if time.monotonic() > deadline:
            return [f"the service is not back {RECOVERY_SECONDS:g} s after the last fault"]
        time.sleep(1)
    return left_behind(observer, before, connected)


def main() -> int:
    """Run the soak as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: 20)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds from fault to fault (default: 30)")
    parser.add_argument(
        "--spare",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="of the time, at its end, in which the engine is left alone (default: 0.5)",
    )
    parser.add_argument("--traces", type=int, default=TRACES, help=f"how many run at a time (default: {TRACES})")
    parser.add_argument("--seed", type=int, default=0, help="of the cases and the faults (default: 0)")
    parser.add_argument("--memory", type=Path, metavar="FILE", help="where to write what each process had, as JSON")
    args = parser.parse_args()
    report, faults, watch = soak(args.minutes, args.every, args.spare, args.traces, args.seed)
    if args.memory is not None:
        args.memory.write_text(json.dumps(watch.series(), indent=1) + "\n")
    for kind, count in sorted(report.endings.items()):
        print(f"  {kind:40} {count}")
    for name, count in sorted(faults.caused.items()):
        print(f"  fault: {name:33} {count}")
    recoveries = faults.recoveries
    if recoveries:
        print(
            f"  the engine was back after, s{'':13} median {statistics.median(recoveries):.0f}, at most {max(recoveries):.0f}"
        )
    roles: dict[str, list[Memory]] = defaultdict(list)
    for memory in watch.lived:
        roles[memory.name].append(memory)
    for name, lives in sorted(roles.items()):
        first, last = max((one.growth for one in lives), key=lambda pair: pair[1] - pair[0])
        print(f"  {name:40} {first / _MIB:.0f} -> {last / _MIB:.0f} MiB, the most of {len(lives)}")
    wrong = report.wrong + [
        f"{one.name} grew from {one.growth[0] / _MIB:.0f} to {one.growth[1] / _MIB:.0f} MiB"
        for one in watch.lived
        if not one.flat
    ]
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
