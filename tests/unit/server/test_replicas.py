"""The replica board: a model is what its replicas last said, and silence means gone."""

from __future__ import annotations

import pytest

from actors import replicas
from actors.protocol import ReplicaReport
from actors.replicas import ReplicaBoard


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replicas, "time", clock)
    return clock


def report(replica: str, stage: str = "", healthy: bool = True, running: int = 0) -> ReplicaReport:
    return ReplicaReport("engine-x", replica, stage, healthy, running=running, waiting=1)


def test_nobody_is_unhealthy(clock: Clock) -> None:
    assert ReplicaBoard().state("engine-x").state == "UNHEALTHY"


def test_one_that_runs_is_enough(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a", stage="loading"))
    assert board.state("engine-x").state == "LOADING"
    board.report(report("b", running=3))
    board.report(report("c", running=4))
    state = board.state("engine-x")
    assert (state.state, state.replicas, state.running, state.waiting) == ("RUNNING", 2, 7, 2)
    assert board.state("engine-y").state == "UNHEALTHY"


def test_a_stage_counts_from_its_beginning(clock: Clock) -> None:
    board = ReplicaBoard()
    for second in range(5):
        clock.now = 1000.0 + second
        board.report(report("a", stage="importing" if second < 2 else "loading"))
    assert board.state("engine-x").stages == (("loading", 2.0),)


def test_an_unhealthy_one_does_not_count(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    board.report(report("a", healthy=False))
    assert board.state("engine-x").state == "UNHEALTHY"


def test_silence_is_an_end(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    clock.now += replicas.SILENCE_SECONDS + 1
    assert board.state("engine-x").state == "UNHEALTHY"
