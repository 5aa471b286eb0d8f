"""The idle connections between an engine and its workers: each side learns that the other side is gone.

An engine's process ends with the process that started it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.cluster import liveness as lifeline
from executor.cluster.liveness import Lifeline, Ticket, exit_with_parent

_WORKER = """
import sys, time
from executor.cluster.liveness import Ticket, hold
hold(Ticket(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])), int(sys.argv[4]))
print("held", flush=True)
# A worker whose block holds the interpreter's lock still answers.
while True:
    sum(range(10**7)) if sys.argv[5] == "busy" else time.sleep(60)
"""

_REPLICA = """
import multiprocessing, sys, time
from executor.cluster.liveness import exit_with_parent

def engine():
    exit_with_parent()
    print("started", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context(sys.argv[1]).Process(target=engine).start()
    time.sleep(600)
"""


@pytest.fixture
def engine() -> Iterator[Lifeline]:
    made = Lifeline("127.0.0.1", 2)
    yield made
    made.close()


def worker(ticket: Ticket, rank: int, kind: str = "busy") -> subprocess.Popen[str]:
    arguments = [ticket.host, str(ticket.port), ticket.token.hex(), str(rank), kind]
    process = subprocess.Popen([sys.executable, "-c", _WORKER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def workers(engine: Lifeline) -> Iterator[list[subprocess.Popen[str]]]:
    started = [worker(engine.ticket, 0), worker(engine.ticket, 1, "idle")]
    engine.accept()
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_a_worker_that_dies_is_known_at_once(engine: Lifeline, workers: list[subprocess.Popen[str]]) -> None:
    assert engine.lost(0.2) == []
    workers[1].kill()
    begun = time.monotonic()
    assert engine.lost(30.0) == [1] and time.monotonic() - begun < 15
    workers[0].kill()
    workers[0].wait()
    while engine.lost(1.0) != [0, 1]:
        assert time.monotonic() - begun < 30


def test_workers_go_with_their_engine(engine: Lifeline, workers: list[subprocess.Popen[str]]) -> None:
    engine.close()
    engine.close()
    assert [process.wait(60) for process in workers] == [1, 1]
    assert engine.lost(0.0) == []


def test_a_worker_that_is_missing(engine: Lifeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the token, or with a rank that is not there, is no worker."""
    monkeypatch.setattr(lifeline, "_CONNECT_SECONDS", 1.0)
    right = engine.ticket.token
    for said in (right + bytes(4), right + (7).to_bytes(4, "big"), bytes(32) + (1).to_bytes(4, "big"), b""):
        with socket.create_connection((engine.ticket.host, engine.ticket.port)) as connection:
            connection.sendall(said)
    with pytest.raises(RuntimeError, match=r"workers \[1\] did not connect"):
        engine.accept()


def test_strangers_do_not_keep_an_engine_from_its_workers(engine: Lifeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with silence nor with a word now and then, and however many they are."""
    monkeypatch.setattr(lifeline, "_GREETING_SECONDS", 0.1)
    monkeypatch.setattr(lifeline, "_CONNECT_SECONDS", 20.0)
    address = engine.ticket.host, engine.ticket.port
    strangers = [socket.create_connection(address) for _ in range(10)]
    workers = [socket.create_connection(address) for _ in range(2)]
    for rank, connection in enumerate(workers):
        connection.sendall(engine.ticket.token + rank.to_bytes(4, "big"))
    begun = time.monotonic()
    engine.accept()
    assert time.monotonic() - begun < 15 and engine.lost(0.0) == []
    for connection in (*strangers, *workers):
        connection.close()


def test_a_node_that_is_cut_off_is_noticed_within_ten_seconds() -> None:
    assert lifeline.SILENCE_SECONDS <= 6
    with socket.socket() as connection:
        lifeline._keep_alive(connection)
        options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == lifeline.SILENCE_SECONDS


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_engine_goes_with_its_replica(tmp_path: Path, method: str) -> None:
    script = tmp_path / "replica.py"
    script.write_text(_REPLICA)
    replica = subprocess.Popen([sys.executable, script, method], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None and replica.stdout.readline() == "started\n"
    replica.kill()
    replica.communicate(timeout=60)  # what it printed ends when both have: the engine holds the pipe too


def test_a_process_that_nobody_started_for_an_engine_stays() -> None:
    exit_with_parent()
    assert "interpose-parent" not in {thread.name for thread in threading.enumerate()}
