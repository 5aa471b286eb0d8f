"""The soak's own parts: a way that can be cut, the order of the faults, and whose cluster a process would join."""

from __future__ import annotations

import json
import mmap
import random
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import processes, tenants
from benchmarks.relay import Relay
from benchmarks.soak import DEPLOYED, SANDBOXED, TAKES_ENGINE, VICTIMS, ZYGOTE, Faults, Watch
from interpose.v1.service_pb2 import ModelStatus, StatusReply


def test_a_relay_passes_on_both_ways_until_it_is_cut_and_then_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            for _ in range(2):
                taken, _ = server.accept()
                with taken:
                    while data := taken.recv(1 << 16):
                        taken.sendall(data[::-1])

        echoing = threading.Thread(target=echo, daemon=True)
        echoing.start()
        relay = Relay(f"127.0.0.1:{server.getsockname()[1]}")
        host, port = relay.address.split(":")
        assert not relay.cut(), "there is no connection yet"
        for _ in range(2):
            with socket.create_connection((host, int(port)), timeout=10) as near:
                near.sendall(b"abc")
                assert near.recv(1 << 16) == b"cba"
                assert relay.cut()
                assert near.recv(1 << 16) == b"", "the other end is to be gone"
        echoing.join(10)
        assert not echoing.is_alive(), "the server's end is to be gone too"
        relay.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=10)


def test_the_memory_of_each_process_is_noted() -> None:
    own = psutil.Process()
    watch = Watch(own)
    assert watch.series() == [], "nothing was looked at yet"
    for _ in range(2):
        watch.sample()
    noted, *_ = json.loads(json.dumps(watch.series()))  # what it started comes after it
    assert [seconds for seconds, _ in noted["MiB"]] == [0, 0]
    size = noted["MiB"][1][1]
    info = own.memory_info()
    assert size == pytest.approx((info.rss - info.shared) / 2**20, rel=0.1)
    with mmap.mmap(-1, 64 << 20) as shared, mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE) as private:
        shared.write(b"x" * len(shared))
        watch.sample()
        private.write(b"x" * len(private))
        watch.sample()
    sizes = [mib for _, mib in watch.series()[0]["MiB"]]  # type: ignore[attr-defined]
    assert sizes[2] == pytest.approx(size, abs=16), "what is shared does not count"
    assert sizes[3] == pytest.approx(size + 64, abs=16)


def faults_of(state: str, spare_in: float, seconds: float = 4.0) -> Faults:
    """Run faults that do nothing against a service in a state."""
    client: Any = SimpleNamespace(status=lambda: StatusReply(models=[ModelStatus(name="llama", state=state)]))
    names = (*VICTIMS, DEPLOYED, "a client is killed")
    causes = {name: (lambda _, name=name: name != "the ingress") for name in names}
    faults = Faults(causes, client, 0.0, time.monotonic() + spare_in, 0)
    faults.start()
    time.sleep(seconds)
    faults.end()
    return faults


def test_faults_that_take_the_engine_wait_until_it_runs() -> None:
    """After one it is away, as far as they know, for ten seconds at least."""
    faults = faults_of("RUNNING", 60.0)
    assert sum(faults.caused[name] for name in TAKES_ENGINE) == 1
    assert sum(faults.caused.values()) > 1 and "the ingress" not in faults.caused, "there was none to lose"


@pytest.mark.parametrize(("state", "spare_in"), [("LOADING", 60.0), ("RUNNING", -1.0)])
def test_an_engine_that_is_away_or_spared_is_left_alone(state: str, spare_in: float) -> None:
    faults = faults_of(state, spare_in)
    assert faults.caused and not set(faults.caused) & set(TAKES_ENGINE)


def test_no_head_is_found_where_there_is_none() -> None:
    with pytest.raises(LookupError, match="no Ray head"):
        processes.joining([psutil.Process()])


def test_strangers_are_a_share_of_the_clients() -> None:
    given = tenants.keys(8, 0.25)
    assert given == [tenants.LAB] * 6 + [tenants.STRANGERS] * 2
    assert tenants.keys(3, 1.0)[0] == tenants.LAB, "somebody gives the results alone"


def test_zygotes_and_their_processes_are_found_and_missed_when_they_stay() -> None:
    forks = f"import os, time; os.fork(); time.sleep(600)  # {processes.SANDBOX}"
    with subprocess.Popen([sys.executable, "-c", forks]) as zygote:
        own = psutil.Process()
        try:
            deadline = time.monotonic() + 30
            while tenants.sandboxes(own) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            first, forked = processes.zygotes(own.children(recursive=True))
            assert [one.pid for one in first] == [zygote.pid] and [one.ppid() for one in forked] == [zygote.pid]
            assert tenants.left(own, 2, 0.0) == []
            assert tenants.left(own, 0, 0.0) == ["zygotes and sandboxed processes: 2, before 0"]
            names = Watch(own).processes()
            assert names[first[0]] == ZYGOTE and names[forked[0]] == SANDBOXED
            assert Watch(own).kill(ZYGOTE, random.Random(0))
        finally:
            for one in forked:
                one.kill()
            zygote.kill()
