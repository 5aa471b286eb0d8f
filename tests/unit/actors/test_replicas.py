"""The replica board: a model is what its replicas last said, silence means gone, and a session has one replica."""

from __future__ import annotations

import pytest

from actors import replicas
from actors.protocol import Announced, ReplicaReport, StartFailed, Target
from actors.replicas import ReplicaBoard
from serve_app.settings import ModelSettings


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


X = Target("app", "engine-x")
MODEL = ModelSettings(model="m", name="x")


def report(
    replica: str, stage: str = "", healthy: bool = True, running: int = 0, target: Target = X, model: object = MODEL
) -> ReplicaReport:
    return ReplicaReport(target, model, replica, stage, healthy, running=running, waiting=1)


def test_nobody_is_unhealthy(clock: Clock) -> None:
    assert ReplicaBoard().state(X).state == "UNHEALTHY"


def test_one_that_runs_is_enough(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a", stage="loading"))
    assert board.state(X).state == "LOADING"
    board.report(report("b", running=3))
    board.report(report("c", running=4))
    state = board.state(X)
    assert (state.state, state.replicas, state.running, state.waiting) == ("RUNNING", 2, 7, 2)
    assert board.state(Target("app", "engine-y")).state == "UNHEALTHY"


def failing(replica: str, failed: StartFailed) -> ReplicaReport:
    return ReplicaReport(X, MODEL, replica, "loading", healthy=False, failed=failed)


def test_a_permanent_failure_is_told_to_the_next_tries_for_a_while(clock: Clock) -> None:
    board, failed = ReplicaBoard(), StartFailed("no weights", True, "v1 on n1")
    assert board.start_failure(X, MODEL, "v1 on n1") is None
    board.report(failing("a", failed))
    assert board.state(X).failed == failed
    clock.now += 50
    assert board.start_failure(X, MODEL, "v1 on n1") == failed
    board.report(failing("b", failed))  # the second try, which was told
    for model, attempt in ((MODEL, "v2 on n1"), (MODEL, "v1 on n2"), (ModelSettings(model="n", name="x"), "v1 on n1")):
        assert board.start_failure(X, model, attempt) is None
    assert board.start_failure(Target("app", "engine-y"), MODEL, "v1 on n1") is None
    clock.now += 11
    assert board.start_failure(X, MODEL, "v1 on n1") is None
    assert board.state(X).failed == failed


def test_a_passing_failure_is_tried_again(clock: Clock) -> None:
    board, failed = ReplicaBoard(), StartFailed("a worker died", False, "v1 on n1")
    board.report(failing("a", failed))
    assert board.state(X).failed == failed
    assert board.start_failure(X, MODEL, "v1 on n1") is None


def test_a_model_that_has_run_is_always_started_again(clock: Clock) -> None:
    board, failed = ReplicaBoard(), StartFailed("no memory", True, "v1 on n1")
    board.report(failing("a", failed))
    board.report(report("b"))
    assert board.state(X).failed is None and board.start_failure(X, MODEL, "v1 on n1") is None
    board.report(failing("c", failed))
    assert board.state(X).failed == StartFailed("no memory", False, "v1 on n1")
    assert board.start_failure(X, MODEL, "v1 on n1") is None


def test_a_stage_counts_from_its_beginning(clock: Clock) -> None:
    board = ReplicaBoard()
    for second in range(5):
        clock.now = 1000.0 + second
        board.report(report("a", stage="importing" if second < 2 else "loading"))
    assert board.state(X).stages == (("loading", 2.0),)


def test_workers_say_how_far_they_are_while_their_replica_loads(clock: Clock) -> None:
    board = ReplicaBoard()
    board.worker("a", 0, "importing vLLM")
    board.report(report("a", stage="loading"))
    board.worker("a", 1, "importing vLLM")
    board.worker("a", 0, "loading the model")
    board.report(report("a", stage="loading"))
    [(stage, _)] = board.state(X).stages
    assert stage == "loading (worker 0: loading the model, worker 1: importing vLLM)"
    board.report(report("a"))
    assert board.state(X).stages == () and board.state(X).each[0].stage == ""


def test_an_unhealthy_one_does_not_count(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    board.report(report("a", healthy=False))
    assert board.state(X).state == "UNHEALTHY"


def test_silence_is_an_end(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    clock.now += replicas.SILENCE_SECONDS + 1
    assert board.state(X).state == "UNHEALTHY"


def test_one_that_was_found_dead_is_gone_at_once_unless_it_lives(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    board.lost("a")
    assert board.state(X).state == "UNHEALTHY" and board.place("s", X) == ""
    board.report(report("a"))
    assert board.state(X).state == "RUNNING"


def test_a_session_keeps_its_replica_whatever_the_others_have_to_do(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    first = board.place("s", X)
    board.report(report("b"))
    board.report(report("a", running=9))
    assert [board.place("s", X) for _ in range(5)] == [first] * 5 == ["a"] * 5
    assert board.place("t", X) == "b", "another one goes where there is less to do"


def test_sessions_that_come_at_once_are_spread(clock: Clock) -> None:
    """Before any of them is seen in a report, and also when none runs anything."""
    board = ReplicaBoard()
    for name in "abc":
        board.report(report(name))
    assert sorted(board.place(f"s{number}", X) for number in range(6)) == ["a", "a", "b", "b", "c", "c"]
    for name in "abc":
        board.report(report(name))
    assert sorted(board.place(f"t{number}", X) for number in range(3)) == ["a", "b", "c"]
    assert [one.sessions for one in board.state(X).each] == [3, 3, 3]


def test_load_counts_before_the_number_of_sessions(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a", running=2))
    board.report(report("b"))
    assert [board.place(f"s{number}", X) for number in range(2)] == ["b", "b"]
    assert board.place("s2", X) == "a", "two on their way count like two that run"


@pytest.mark.parametrize("gone", ["lost", "unhealthy", "silent", "loading"])
def test_the_sessions_of_a_replica_that_is_gone_go_on_with_another(clock: Clock, gone: str) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    assert board.place("s", X) == "a"
    if gone == "silent":
        clock.now += replicas.SILENCE_SECONDS + 1
    board.report(report("b"))
    if gone == "lost":
        board.lost("a")
    elif gone != "silent":
        board.report(report("a", healthy=gone != "unhealthy", stage="again" if gone == "loading" else ""))
    assert board.place("s", X) == "b"
    board.report(report("a"))
    assert board.place("s", X) == "b", "and stay there"


def test_a_session_that_another_replica_has_taken_belongs_to_that_one(clock: Clock) -> None:
    """A replica that is being removed reports to its end, but Serve sends it nothing any more."""
    board = ReplicaBoard()
    board.report(report("a"))
    board.place("s", X)
    board.report(report("b"))
    board.moved("s", X, "b")
    assert board.place("s", X) == "b"
    board.left("s")
    board.moved("s", X, "b")
    assert [one.sessions for one in board.state(X).each] == [0, 0], "nothing is kept of a session that has ended"


def test_models_of_other_applications(clock: Clock) -> None:
    board = ReplicaBoard()
    other = Target("more", "engine-y")
    y = ModelSettings(model="m", name="y")
    assert board.report(report("a")) == ""
    assert board.report(report("b", stage="loading", target=other, model=y)) == ""
    assert {one.target for one in board.announced()} == {X, other}
    assert Announced(other, y) in board.announced()
    assert board.place("s", other) == "" and board.place("s", X) == "a"
    clock.now += replicas.LOADING_SILENCE_SECONDS + 1
    assert {one.target for one in board.announced()} == {X, other}, "without engines, not unknown"
    assert board.state(X).state == board.state(other).state == "UNHEALTHY"
    clock.now += replicas.ABSENCE_SECONDS
    assert board.announced() == ()


def test_a_model_is_known_while_its_only_replica_is_replaced_and_not_when_it_is_removed(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    board.lost("a")
    assert board.announced() == (Announced(X, MODEL),) and board.state(X).state == "UNHEALTHY"
    assert board.place("s", X) == ""
    board.report(report("b", stage="loading"))
    assert board.announced() == (Announced(X, MODEL),) and board.state(X).state == "LOADING"
    board.report(report("b", healthy=False))
    clock.now += replicas.SILENCE_SECONDS + 1
    assert board.announced() == (Announced(X, MODEL),), "the first has never said that it goes"
    clock.now += replicas.ABSENCE_SECONDS
    assert board.announced() == ()


def test_while_replicas_are_replaced_the_newest_that_take_traces_say_what_the_model_is(clock: Clock) -> None:
    board = ReplicaBoard()
    new = ModelSettings(model="another", name="x")
    board.report(report("a"))
    board.report(report("b", stage="loading", model=new))
    assert board.announced() == (Announced(X, MODEL),)
    board.report(report("b", model=new))
    board.report(report("a"))
    assert board.announced() == (Announced(X, new),)
    board.report(report("b", healthy=False, model=new))
    assert board.announced() == (Announced(X, MODEL),)


def test_two_applications_cannot_serve_models_of_one_name(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    again = report("b", target=Target("more", "engine-x"))
    assert "served by the application 'app' already" in board.report(again)
    assert [one.replica for one in board.state(X).each] == ["a"] and len(board.announced()) == 1
    board.report(report("a", healthy=False))
    assert board.report(again) == "", "when that one has gone, it can"


def test_a_draining_replica_gives_its_sessions_to_others(clock: Clock) -> None:
    board = ReplicaBoard()
    for name in "ab":
        board.report(report(name))
    first = board.place("s", X)
    other = "b" if first == "a" else "a"
    assert board.drain(X, first, end=False) and board.draining == [f"x/{first}"]
    assert board.place("s", X) == other and board.state(X).state == "RUNNING"
    assert {one.replica: state for one, state in board.reports()} == {first: "draining", other: "running"}
    assert not board.drain(X, "c", end=False) and not board.drain(Target("app", "engine-y"), first, end=False)
    assert board.drain(X, other, end=False) and board.place("s", X) == "" and board.state(X).state == "DRAINING"
    assert board.drain(X, first, end=True) and board.place("s", X) == first


def test_a_draining_replica_that_is_gone_is_forgotten(clock: Clock) -> None:
    board = ReplicaBoard()
    board.report(report("a"))
    board.drain(X, "a", end=False)
    clock.now += replicas.SILENCE_SECONDS + replicas.ABSENCE_SECONDS + 1
    board.report(report("b"))
    assert board.draining == [] and board.place("s", X) == "b"


def test_models_and_the_service_drain(clock: Clock) -> None:
    board, other = ReplicaBoard(), Target("app", "engine-y")
    board.report(report("a"))
    board.report(report("b", target=other, model=ModelSettings(model="m", name="y")))
    board.drain(X, "", end=False)
    assert board.draining == ["x"] and (board.place("s", X), board.place("s", other)) == ("", "b")
    board.drain(None, "", end=False)
    assert board.closed and board.draining == ["service", "x"] and board.place("s", other) == ""
    board.drain(None, "", end=True)
    assert not board.closed and board.place("s", other) == "b" and board.place("s", X) == ""
    board.drain(X, "", end=True)
    assert board.place("s", X) == "a" and board.draining == []
