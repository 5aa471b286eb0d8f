"""A worker that a block holds in code that nothing interrupts is ended by its watchdog, which names the trace."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from executor.cluster.liveness import Lifeline
from executor.cluster.verdicts import Verdicts, report

_WORKER = """
import hashlib, signal, sys, threading, time
from executor.block import budget
from executor.block import watchdog
from executor.block.budget import Budget
from executor.cluster.liveness import Ticket, hold

watchdog.GRACE_SECONDS = budget.GRACE_SECONDS = 0.5
watchdog.start(hold(Ticket(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])), 0))
print(watchdog._started[1].pid, flush=True)
budget = Budget(0.2, 1 << 40, watchdog.heartbeat())
budget.begin_step()
budget.arm(lambda: True, 0.0)
budget.disarm()
time.sleep(0.45)  # the next beat is due soon: the last one is older than the block
budget.arm(lambda: True, 0.0, watchdog.padded("trace-7"))
try:
    exec(sys.argv[4])
except BaseException as error:
    budget.disarm()
    print(type(error).__name__, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def engine() -> Iterator[Lifeline]:
    made = Lifeline("127.0.0.1", 1)
    yield made
    made.close()


@contextlib.contextmanager
def worker(engine: Lifeline, code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that runs code as a block; yields it, and the id of its watchdog."""
    ticket = engine.ticket
    arguments = [ticket.host, str(ticket.port), ticket.token.hex(), code]
    process = subprocess.Popen([sys.executable, "-c", _WORKER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    watchdog = int(process.stdout.readline())
    engine.accept()
    try:
        yield process, watchdog
    finally:
        process.kill()
        process.wait()


def gone(watchdog: int) -> bool:
    """Wait until a watchdog has ended."""
    try:
        descriptor = os.pidfd_open(watchdog)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(30_000))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "code",
    [
        "sum(range(10**12))",
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
        "signal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True:\n    try:\n        sum(range(10**12))\n    except BaseException: pass",
    ],
)
def test_what_no_signal_ends_ends_the_worker(engine: Lifeline, code: str) -> None:
    with worker(engine, code) as (process, watchdog):
        assert process.wait(60) == -signal.SIGKILL
        lost: list[int] = []
        while not lost:
            lost = engine.lost(30.0)
        assert (lost, engine.overdue) == ([0], ["trace-7"])
        assert gone(watchdog)


def test_a_thread_that_keeps_the_interpreters_lock_ends_the_worker_and_blames_no_trace(engine: Lifeline) -> None:
    code = "threading.Thread(target=lambda: (time.sleep(1), sum(range(10**12)))).start()\n1 / 0"
    with worker(engine, code) as (process, _):
        assert process.wait(60) == -signal.SIGKILL
        assert engine.lost(30.0) == [0]
        assert engine.overdue == []


def test_a_worker_whose_block_came_back_lives_on_and_takes_its_watchdog_with_it(engine: Lifeline) -> None:
    with worker(engine, "while True: pass") as (process, watchdog):
        assert process.stdout is not None
        assert process.stdout.readline() == "BudgetExceeded\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.0)
        process.kill()
        assert engine.lost(30.0) == [0]
        assert engine.overdue == []
        assert gone(watchdog)


def test_the_replica_learns_which_trace_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSE_ENGINE_VERDICTS", "")
    report(["nobody listens"])
    verdicts = Verdicts()
    try:
        report([])
        report(["trace-7"])
        report(["trace-8", "trace-7"])
        assert [verdicts.guilty(one) for one in ("trace-7", "trace-8", "trace-", "trace-9")] == [
            True,
            True,
            False,
            False,
        ]
    finally:
        verdicts.close()
    report(["the replica is gone"])


def test_what_is_no_verdict_is_an_end(engine: Lifeline) -> None:
    ticket = engine.ticket
    with socket.create_connection((ticket.host, ticket.port)) as connection:
        connection.sendall(ticket.token + bytes(4))
        engine.accept()
        assert engine.lost(0.0) == []
    assert engine.lost(30.0) == [0]
