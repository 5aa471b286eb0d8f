"""What Serve is told about each deployment."""

from __future__ import annotations

from typing import Any

import pytest

from actors.routing import SessionRouter
from serve_app import app, builder
from serve_app.settings import ModelSettings, settings_from


def deployments(application: Any) -> dict[str, Any]:
    """The deployments of an application, by name, the ingress's engines among them."""
    bound = application._bound_deployment
    found = {bound.name: bound}
    for argument in bound.init_args:
        for inner in argument.values() if isinstance(argument, dict) else ():
            found |= deployments(inner)
    return found


def test_each_model_has_its_own_layout() -> None:
    settings = settings_from(
        {
            "models": [
                {"model": "a", "tensor_parallel_size": 2, "device": "gpu", "replicas": 3, "placement": "SPREAD"},
                {"model": "b", "device": "cpu", "max_running_traces": 7, "drain_seconds": 90},
            ]
        }
    )
    found = deployments(builder.build(settings))
    assert set(found) == {"ingress", "engine-a", "engine-b"}
    a, b = found["engine-a"], found["engine-b"]
    assert (a.num_replicas, b.num_replicas) == (3, 1)
    assert a._replica_config.placement_group_bundles == [{"GPU": 1.0}] * 2
    assert b._replica_config.placement_group_bundles == [{"CPU": 1.0}]
    assert [one._replica_config.placement_group_strategy for one in (a, b)] == ["SPREAD", "PACK"]
    assert [one._deployment_config.graceful_shutdown_timeout_s for one in (a, b)] == [300, 90]
    assert b.max_ongoing_requests == 7 + 8 * 1024
    router = a._deployment_config.request_router_config.get_request_router_class()
    assert router is SessionRouter


def test_serve_gets_its_autoscaling_settings() -> None:
    given = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 6, "upscale_delay_s": 3}
    model = ModelSettings(model="a", autoscaling_config=given)
    assert model.most_replicas == 4
    config = deployments(builder.build_model(model))["engine-a"]._deployment_config.autoscaling_config
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_replica": 2}, "autoscaling_config of a: Ray Serve has no max_replica"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas .2. must be greater than or equal to min_replicas"),
        ({"max_replicas": "many"}, "autoscaling_config of a: max_replicas: "),
    ],
)
def test_what_serve_would_refuse_or_forget(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        builder.build_model(ModelSettings(model="a", autoscaling_config=config))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"autoscaling_config": {"max_replicas": 2}, "replicas": 2}, "either `replicas` or"),
        ({"placement": "pack"}, "PACK"),
        ({"drain_seconds": -1}, "drain_seconds"),
        ({"replicas": 0}, "replicas"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelSettings(model="a", **fields)


def test_a_model_may_have_no_engine_while_nobody_uses_it() -> None:
    model = ModelSettings(model="a", autoscaling_config={"min_replicas": 0, "max_replicas": 2})
    assert model.scales_to_zero and not ModelSettings(model="a").scales_to_zero
    service = builder.build(settings_from({"models": [model]}))
    assert deployments(service)["engine-a"]._deployment_config.autoscaling_config.min_replicas == 0
    with pytest.raises(ValueError, match="list it under the service's `models`"):
        app.build_model({"model": "a", "autoscaling_config": {"min_replicas": 0}})


def test_a_model_is_an_application_too() -> None:
    found = deployments(app.build_model({"model": "/models/tiny", "name": "more", "device": "cpu"}))
    assert set(found) == {"engine-more"}
    with pytest.raises(ValueError, match="tenants: there is no such setting"):
        app.build_model({"model": "x", "tenants": []})
