"""The models that clients can ask for, and what becomes of one that has no engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol import Announced, ModelState, Target
from interpose.v1.model_pb2 import ModelDescription
from serve_app import models
from serve_app.models import ServedModel, ServedModels
from serve_app.settings import ModelSettings

A, B = ModelSettings(model="a"), ModelSettings(model="b")
SLEEPY = ModelSettings(model="s", autoscaling_config={"min_replicas": 0})
OTHER = Target("other", "engine-b")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedModels:
    monkeypatch.setattr(
        models, "serve", SimpleNamespace(get_deployment_handle=lambda deployment, app, **_: (app, deployment))
    )
    engines: dict[str, Any] = {"a": "a's", "s": "s's"}
    return ServedModels("app", [A, SLEEPY], engines)


def test_models_of_other_applications_come_and_go(served: ServedModels) -> None:
    assert served.update([Announced(OTHER, B)])
    assert [one.name for one in served.settings] == ["a", "s", "b"]
    assert served["b"].target == OTHER and served["b"].engine == ("other", "engine-b")
    found = served["b"]
    assert not served.update([Announced(OTHER, B)]) and served["b"] is found
    changed = B.model_copy(update={"drain_seconds": 1.0})
    assert served.update([Announced(OTHER, changed)]) and served["b"] is not found, "it has to be described anew"
    assert served.update([]) and served.targets == [Target("app", "engine-a"), Target("app", "engine-s")]


def test_an_own_model_is_nobody_elses(served: ServedModels) -> None:
    assert not served.update([Announced(Target("other", "engine-a"), A)])
    assert served["a"].target == Target("app", "engine-a")


def test_a_model_is_idle_where_it_may_be_without_an_engine(served: ServedModels) -> None:
    none, loading = ModelState("UNHEALTHY", 0, 0, 0), ModelState("LOADING", 0, 0, 0)
    assert [served[name].state(none) for name in "as"] == ["UNHEALTHY", "IDLE"]
    assert served["s"].state(loading) == "LOADING"
    assert served.lasting == [Target("app", "engine-a")]


async def test_an_idle_model_is_woken_by_one_call_at_a_time() -> None:
    calls: list[asyncio.Future[None]] = []

    def ping() -> asyncio.Future[None]:
        calls.append(asyncio.get_running_loop().create_future())
        return calls[-1]

    engine: Any = SimpleNamespace(ping=SimpleNamespace(remote=ping))
    model = ServedModel(SLEEPY, Target("app", "engine-s"), engine)
    for _ in range(3):
        model.wake()
        await asyncio.sleep(0)
    assert len(calls) == 1
    calls[0].set_exception(RuntimeError("it does not start"))
    await asyncio.sleep(0.01)
    model.wake()
    await asyncio.sleep(0)
    assert len(calls) == 2
    calls[1].set_result(None)


async def test_only_running_engines_are_asked_and_a_slow_engine_holds_nobody_up(
    served: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "DESCRIBED_SECONDS", 0.05)
    served.update([Announced(OTHER, B)])
    states = {"a": "RUNNING", "s": "UNHEALTHY", "b": "RUNNING"}
    known = {served[name].target: ModelState(state, 1, 0, 0) for name, state in states.items()}
    asked = []

    async def ask(one: ServedModel) -> None:
        asked.append(one.settings.name)
        if one.settings.name == "b":
            await asyncio.sleep(60)
        one.description = ModelDescription(name=one.settings.name)

    for _ in range(2):
        status: Any = SimpleNamespace(models=known)
        assert await served.described(status, ask) is served
    assert asked == ["a", "b", "b"] and served["a"].description is not None and served["b"].description is None
