"""The environment of a service's processes."""

from __future__ import annotations

import os

import pytest

from executor.cluster.environment import hide_credentials, hide_keys
from serve_app.environment import own_head_environment


def test_ray_asks_for_a_token_of_this_service_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    one, other = own_head_environment(), own_head_environment()
    assert one["RAY_AUTH_MODE"] == "token" and len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_what_the_operator_says_of_it_holds(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & own_head_environment().keys()


def test_keys_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSE_TENANTS", "[]")
    monkeypatch.setenv("INTERPOSE_TENANTS__0__API_KEY", "12345678")
    monkeypatch.setenv("INTERPOSE_API_KEY", "12345678")
    monkeypatch.setenv("INTERPOSE_GRPC__PORT", "9001")
    hide_keys()
    assert [name for name in os.environ if name.startswith("INTERPOSE_")] == ["INTERPOSE_GRPC__PORT"]


def test_credentials_go_when_they_have_been_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/cache")
    hide_credentials()
    hide_credentials()
    assert "HF_TOKEN" not in os.environ and os.environ["HF_HOME"] == "/cache"
