"""Mixed clients for minutes while parts of the service are killed: no wrong value, everything back by itself, memory flat.

    python -m benchmarks.soak --minutes 20

serves a small model and runs the crowd of `benchmarks.stress` against it. Every `--every` seconds a random part is killed;
those whose loss takes the engine along only while it runs, so that there is something to lose. A trace that a fault ends must
end with an error that says so; each other one must give what it gives alone. It ends with status 1 if one did not, if the
service does not come back, or if the memory of a process grew.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import psutil

import interpose
from benchmarks import processes
from benchmarks.served import served
from benchmarks.stress import CASES, CLIENTS, ENGINE, Crowd, Report, cases, left_behind, outcome_of
from interpose.errors import InterposeError
from interpose.v1.service_pb2 import StatusReply

TRACES = 24
SAMPLE_SECONDS = 5.0
RECOVERY_SECONDS = 300.0
# A process may have grown by so much between the third quarter of its life and the last, of those that lived for five minutes:
# Ray's and the engine's processes take two or three until all of their threads have allocated what they will.
GROWTH = 0.05
GROWTH_BYTES = 16 << 20
LIFE_SECONDS = 300.0
_MIB = 1 << 20

# What a trace may end with when a part that it needed was killed.
LOST = ("Unavailable", "ConnectionLost")

# By a part of the process's name: whether the engine goes with it.
VICTIMS = {
    "ServeReplica:interpose:ingress": False,
    "ray::Session": False,
    "LazyWorkerActor": True,
    processes.ENGINE: True,
    "ServeReplica:interpose:engine-llama": True,
}


@dataclass
class Memory:
    """The resident memory of one process over its life, bytes by seconds."""

    name: str
    samples: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it was seen."""
        return self.samples[-1][0] - self.samples[0][0]

    @property
    def growth(self) -> tuple[float, float]:
        """Medians of its third quarter and of its last one."""
        quarter = max(1, len(self.samples) // 4)
        early, late = self.samples[2 * quarter : 3 * quarter] or self.samples, self.samples[-quarter:]
        return statistics.median(size for _, size in early), statistics.median(size for _, size in late)

    @property
    def flat(self) -> bool:
        """Whether it stayed as it was."""
        early, late = self.growth
        return late <= early * (1 + GROWTH) + GROWTH_BYTES


class Watch:
    """The processes of a service: their memory, and now and then the death of one."""

    def __init__(self, service: psutil.Process) -> None:
        self._service = service
        self._seen: dict[tuple[int, float], Memory] = {}

    def processes(self) -> dict[psutil.Process, str]:
        """All of them, with their names."""
        found = {}
        for process in [self._service, *self._service.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                command = process.cmdline() or [process.name()]
                engine = processes.ENGINE in processes.title(process)
                found[process] = processes.ENGINE if engine else command[0].rpartition("/")[2][:60]
        return found

    def sample(self) -> None:
        """Note the memory of each."""
        for process, name in self.processes().items():
            with contextlib.suppress(psutil.Error):
                key = process.pid, process.create_time()
                memory = self._seen.setdefault(key, Memory(name))
                memory.samples.append((time.monotonic(), process.memory_info().rss))

    def kill(self, name: str, rng: random.Random) -> bool:
        """Kill one of those with a part of a name; returns whether there was one."""
        found = [process for process, full in self.processes().items() if name in full]
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(found).kill()
        return bool(found)

    @property
    def lived(self) -> list[Memory]:
        """Those that lived long enough to say something."""
        return [one for one in self._seen.values() if one.samples and one.seconds >= LIFE_SECONDS]


def soak(minutes: float, every: float, traces: int, seed: int) -> tuple[Report, Counter[str], Watch, list[float]]:
    """Run it; returns what traces came to, what was killed how often, the processes, and the seconds of each recovery."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(
            served(tensor_parallel_size=2, warm=CLIENTS, engine={**ENGINE, "enforce_eager": True})
        )
        [service] = [child for child in psutil.Process().children() if "interpose.cli" in " ".join(child.cmdline())]
        observer = stack.enter_context(interpose.connect(address, progress=False))
        before = observer.status()
        connected = stack.enter_context(contextlib.ExitStack())
        clients = [connected.enter_context(interpose.connect(address, progress=False)) for _ in range(CLIENTS)]
        models = [client.model() for client in clients]
        known = [(case, outcome_of(models[0], case)) for case in cases(seed, CASES)]
        crowd = Crowd(models, known, lost=LOST)
        watch = Watch(service)
        ended = threading.Event()
        killed: Counter[str] = Counter()
        recoveries: list[float] = []
        killer = threading.Thread(target=_kill, args=(watch, clients[0], every, seed, ended, killed, recoveries))
        sampler = threading.Thread(target=_sample, args=(watch, ended))
        for thread in (killer, sampler):
            thread.start()
        try:
            report = crowd.run(minutes * 60, traces)
        finally:
            ended.set()
            killer.join()
            sampler.join()
        report.wrong.extend(_afterwards(observer, before, connected))
    return report, killed, watch, recoveries


def _sample(watch: Watch, ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_SECONDS):
        watch.sample()


def _kill(
    watch: Watch,
    client: interpose.Client,
    every: float,
    seed: int,
    ended: threading.Event,
    killed: Counter[str],
    recoveries: list[float],
) -> None:
    rng = random.Random(seed)
    lost_at = 0.0
    following = time.monotonic() + every
    while not ended.wait(0.5):
        runs = _runs(client)
        if lost_at and runs and time.monotonic() - lost_at > 10:  # by then everybody has noticed
            recoveries.append(time.monotonic() - lost_at)
            lost_at = 0.0
        if time.monotonic() < following:
            continue
        following = time.monotonic() + every
        name = rng.choice(
            [name for name, takes_engine in VICTIMS.items() if not takes_engine or (runs and not lost_at)]
        )
        if watch.kill(name, rng):
            killed[name] += 1
            if VICTIMS[name]:
                lost_at = time.monotonic()


def _runs(client: interpose.Client) -> bool:
    try:
        return all(model.state == "RUNNING" for model in client.status().models)
    except InterposeError:
        return False


def _afterwards(observer: interpose.Client, before: StatusReply, connected: contextlib.ExitStack) -> list[str]:
    """What is wrong when it is over, the clients have gone, and everything has had its time."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while not _runs(observer):
        if time.monotonic() > deadline:
            return [f"the service is not back {RECOVERY_SECONDS:g} s after the last fault"]
        time.sleep(1)
    return left_behind(observer, before, connected)


def main() -> int:
    """Run it as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: 20)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds from fault to fault (default: 30)")
    parser.add_argument("--traces", type=int, default=TRACES, help=f"how many run at a time (default: {TRACES})")
    parser.add_argument("--seed", type=int, default=0, help="of the cases and the faults (default: 0)")
    args = parser.parse_args()
    report, killed, watch, recoveries = soak(args.minutes, args.every, args.traces, args.seed)
    for kind, count in sorted(report.endings.items()):
        print(f"  {kind:40} {count}")
    for name, count in sorted(killed.items()):
        print(f"  killed {name:33} {count}")
    if recoveries:
        print(
            f"  the engine was back after, s{'':13} median {statistics.median(recoveries):.0f}, at most {max(recoveries):.0f}"
        )
    roles: dict[str, list[Memory]] = defaultdict(list)
    for memory in watch.lived:
        roles[memory.name].append(memory)
    for name, lives in sorted(roles.items()):
        early, late = max((one.growth for one in lives), key=lambda pair: pair[1] - pair[0])
        print(f"  {name:40} {early / _MIB:.0f} -> {late / _MIB:.0f} MiB, the most of {len(lives)}")
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
