"""Where blocks run follows from the trust of the service's tenants, and operators are told what that means."""

from __future__ import annotations

import pytest

from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from serve_app import settings_trust
from serve_app.settings import Tenant, settings_from
from serve_app.settings_model import ModelSettings
from serve_app.settings_trust import decided, sandboxes, warnings
from serve_app.tenants.admission import check_kind

NONE, CODE, FULL = (Tenant(name=trust, trust=trust) for trust in ("none", "code", "full"))
AUTO = ModelSettings(model="x", sandbox="auto")


@pytest.mark.parametrize(
    ("tenants", "grows", "apart"),
    [
        ((), False, False),
        ((NONE,), False, False),
        ((CODE,), False, False),
        ((CODE, FULL), False, False),
        ((NONE, CODE), False, True),
        ((NONE, Tenant(name="other")), False, True),
        ((CODE,), True, True),
    ],
)
def test_auto_keeps_strangers_apart(tenants: tuple[Tenant, ...], grows: bool, apart: bool) -> None:
    assert sandboxes(AUTO, tenants, grows) is apart
    assert [model.sandbox for model in decided([AUTO], tenants, grows)] == ["on" if apart else "off"]


def test_auto_is_the_default() -> None:
    assert ModelSettings(model="x").sandbox == "auto"


@pytest.mark.parametrize("tenants", [(NONE,), (NONE, CODE)])
def test_what_a_machine_lacks_is_said_at_start(monkeypatch: pytest.MonkeyPatch, tenants: tuple[Tenant, ...]) -> None:
    """Where auto keeps nobody apart, nothing lacks."""
    monkeypatch.setattr(settings_trust, "missing", lambda: ["Landlock"])
    said = [text for text in warnings([AUTO], tenants, False) if "lacks Landlock" in text]
    assert len(said) == int(len(tenants) > 1)
    assert all("traces of tenants with trust none are refused" in text for text in said)


@pytest.mark.parametrize("said", ["on", "off"])
def test_what_is_said_holds_for_any_tenants(said: str) -> None:
    model = ModelSettings(model="x", sandbox=said)
    for tenants in ((), (NONE, CODE)):
        assert decided([model], tenants, True) == (model,)


@pytest.mark.parametrize(("written", "meant"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_the_words_of_yaml_are_taken(written: object, meant: str) -> None:
    assert ModelSettings(model="x", sandbox=written).sandbox == meant


def test_trust_beside_lesser_trust_is_said() -> None:
    [said] = warnings([AUTO], (NONE, CODE), False)
    assert "blocks of code run in the workers' own processes" in said and "of none" in said
    assert not list(warnings([AUTO.model_copy(update={"accepts": "sandboxed"})], (NONE, CODE), False))


def test_strangers_without_a_sandbox_are_said() -> None:
    model = ModelSettings(model="x", sandbox="off")
    [said] = warnings([model], (NONE, Tenant(name="other")), False)
    assert "its sandbox is off" in said
    settings = settings_from(
        {
            "model": "x",
            "sandbox": "off",
            "tenants": [{"name": "a", "api_key": "k" * 30}, {"name": "b", "api_key": "l" * 30}],
        }
    )
    assert "its sandbox is off" in settings.warning


@pytest.mark.parametrize(
    ("accepts", "taken"), [("all", (NONE, CODE, FULL)), ("sandboxed", (NONE,)), ("trusted", (CODE, FULL))]
)
def test_a_model_runs_traces_of_the_kind_that_it_accepts(accepts: str, taken: tuple[Tenant, ...]) -> None:
    model = ModelSettings(model="x", accepts=accepts)
    for tenant in (NONE, CODE, FULL):
        if tenant in taken:
            check_kind(model, tenant)
        else:
            with pytest.raises(ServiceFailure) as refused:
                check_kind(model, tenant)
            assert refused.value.failure.code == pb.ERROR_CODE_PERMISSION_DENIED
