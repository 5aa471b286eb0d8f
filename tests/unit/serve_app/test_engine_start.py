"""An engine replica that cannot start tells the directory why, and the command that waits for it ends with the reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.protocol import ModelState, ReplicaReport, StartFailed, Target
from actors.replicas import ReplicaBoard
from executor.cluster import placement as cluster
from executor.cluster.start_failure import CannotStart, StartFailure
from serve_app import engine, service
from serve_app.engine import EngineDeployment
from serve_app.settings import ModelSettings, SessionSettings, settings_from
from tests.unit.checkpoints import write_checkpoint

TARGET = Target("interpose", "engine-tiny")


class Directory:
    """A directory's part that engine replicas report to."""

    def __init__(self) -> None:
        self.board = ReplicaBoard()
        self.reports: list[ReplicaReport] = []
        self.report = SimpleNamespace(remote=self._report)
        self.start_failure = SimpleNamespace(remote=self._start_failure)

    async def _report(self, report: ReplicaReport) -> str:
        self.reports.append(report)
        return self.board.report(report)

    async def _start_failure(self, *args: Any) -> StartFailed | None:
        return self.board.start_failure(*args)


class Engine:
    """An engine that fails as it is told to."""

    error: Exception | None = None
    starts = 0

    @classmethod
    async def start(cls, model: ModelSettings, progress: Any, metrics: bool) -> Any:
        cls.starts += 1
        if cls.error is not None:
            raise cls.error
        return SimpleNamespace(load=lambda: (0, 0), check_health=lambda: asyncio.sleep(0))


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    directory = Directory()
    replica = SimpleNamespace(
        app_name=TARGET.app, deployment=TARGET.deployment, replica_id=SimpleNamespace(unique_id="r1"), code_version="v1"
    )
    runtime = SimpleNamespace(gcs_address="head:6379", get_node_id=lambda: "n1")
    monkeypatch.setattr(engine, "own_directory", lambda sessions: directory)
    monkeypatch.setattr(engine, "replica_on_this_machine", lambda: None)
    monkeypatch.setattr(engine.serve, "get_replica_context", lambda: replica)
    monkeypatch.setattr(engine.ray, "get_runtime_context", lambda: runtime)
    monkeypatch.setattr(engine, "_import_engine", lambda: Engine)
    monkeypatch.setattr(Engine, "error", None)
    monkeypatch.setattr(Engine, "starts", 0)
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("INTERPOSE_ENGINE_REPLICA", "")
    return directory


class Replica(EngineDeployment):
    """A replica that Python ends, not Serve."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def start(model: ModelSettings) -> None:
    """Run a replica's constructor, as Serve does."""

    async def run() -> None:
        replica = object.__new__(Replica)
        try:
            await EngineDeployment.__init__(replica, model, SessionSettings())  # type: ignore[misc]
        finally:
            replica._reporter.cancel()

    asyncio.run(run())


def test_a_model_that_is_not_there_ends_the_start_before_the_engine_is_imported(directory: Directory) -> None:
    with pytest.raises(CannotStart, match="^there is no folder /nowhere/tiny$"):
        start(ModelSettings(model="/nowhere/tiny"))
    failed = directory.reports[-1].failed
    assert failed == StartFailed("there is no folder /nowhere/tiny", True, "v1 on n1")
    assert Engine.starts == 0


def test_the_next_try_ends_at_once_unless_it_may_succeed(directory: Directory, tmp_path: Path) -> None:
    model = ModelSettings(model=str(write_checkpoint(tmp_path / "tiny")))
    Engine.error = CannotStart(StartFailure("a worker died", permanent=False))
    for starts in (1, 2):
        with pytest.raises(CannotStart, match="a worker died"):
            start(model)
        assert Engine.starts == starts
    Engine.error = CannotStart(StartFailure("too little memory", permanent=True))
    for _ in range(3):
        with pytest.raises(CannotStart, match="too little memory"):
            start(model)
        assert Engine.starts == 3
    Engine.error = None
    start(ModelSettings(model=model.model, engine={"max_model_len": 64}))  # other settings may do better
    assert Engine.starts == 4 and directory.board.state(TARGET).state == "RUNNING"


def waiting(monkeypatch: pytest.MonkeyPatch, failed: StartFailed | None) -> service.Service:
    """A command that waits for a model in this state."""
    state = ModelState("LOADING", 0, 0, 0, failed=failed)
    directory = SimpleNamespace(model_state=SimpleNamespace(remote=lambda target: None))
    monkeypatch.setattr(service.ray, "get_actor", lambda *args, **options: directory)
    monkeypatch.setattr(service.ray, "get", lambda *args, **options: state)
    return service.Service(settings_from({"model": "/models/tiny"}), SimpleNamespace(own=True))  # type: ignore[arg-type]


def test_the_command_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(service.ServiceError, match="^tiny cannot start: no weights$"):
        waiting(monkeypatch, StartFailed("no weights", True, "v1"))._stage()


def test_what_may_pass_is_waited_for_until_serve_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    command = waiting(monkeypatch, StartFailed("a worker died", False, "v1"))
    assert command._stage() == service.DEPLOYING
    deployment = SimpleNamespace(message="The deployment failed to start 3 times in a row. Traceback …")
    application = SimpleNamespace(status="DEPLOY_FAILED", message="", deployments={"engine-tiny": deployment})
    status = SimpleNamespace(applications={service.APP: application})
    monkeypatch.setattr(service.serve, "status", lambda: status)
    with pytest.raises(service.ServiceError, match="^tiny cannot start: a worker died$"):
        command._running()
    other = waiting(monkeypatch, None)
    other._stage()
    with pytest.raises(service.ServiceError, match="failed to start 3 times"):
        other._running()


class Calls:
    """Ray's calls of workers: each is what it ends with."""

    def __init__(self, ends: list[Any]) -> None:
        self._ends = ends
        self._first = next((index for index, end in enumerate(ends) if isinstance(end, Exception)), 0)

    def wait(self, refs: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        assert timeout <= cluster.WAIT_SECONDS
        done = [self._first] if num_returns == 1 and self._first in refs else refs[:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, refs: Any) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if isinstance(self._ends[refs], Exception):
            raise self._ends[refs]
        return self._ends[refs]


def test_workers_that_fail_are_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ray", Calls(["a", "b"]))
    assert cluster.wait_ready([0, 1], "loading") == ["a", "b"]
    died = ray.exceptions.ActorDiedError()
    for ends, failure in (
        (
            [RuntimeError("Connection closed by peer"), ValueError("cut off")],
            StartFailure("loading, worker 1: cut off", True),
        ),
        ([None, AssertionError("shapes")], StartFailure("loading, worker 1: AssertionError: shapes", True)),
    ):
        monkeypatch.setattr(cluster, "ray", Calls(ends))
        with pytest.raises(CannotStart) as caught:
            cluster.wait_ready([0, 1], "loading")
        assert caught.value.failure == failure
    monkeypatch.setattr(cluster, "ray", Calls([died, None]))
    with pytest.raises(CannotStart) as caught:
        cluster.wait_ready([0, 1], "loading")
    assert not caught.value.failure.permanent
