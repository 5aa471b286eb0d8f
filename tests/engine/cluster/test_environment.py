"""What workers get of the engine's environment: an allow-list, on which no secret of the service is."""

from __future__ import annotations

import os

import pytest
from vllm import envs

from executor.cluster.environment import forwarded

GIVEN = {
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "NCCL_DEBUG": "INFO",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}
KEPT = {
    "INTERPOSE_TENANTS": '[{"name": "a", "api_key": "12345678"}]',
    "RAY_AUTH_TOKEN": "0" * 64,
    "VLLM_API_KEY": "secret",
    "AWS_SECRET_KEY": "secret",
    "HOME": "/home/somebody",
    "LD_PRELOAD": "x.so",
    # Each worker's or node's own
    "VLLM_HOST_IP": "10.0.0.1",
    "CUDA_VISIBLE_DEVICES": "0",
    "LOCAL_RANK": "0",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    envs.disable_envs_cache()  # vLLM remembers its variables once the process has had an engine
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in (GIVEN | KEPT).items():
        monkeypatch.setenv(name, value)


def test_only_what_is_on_the_list_travels() -> None:
    assert forwarded() == GIVEN


def test_the_list_can_be_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROXY", "http://here")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MY_PROXY")
    extra = {name: os.environ[name] for name in ("MY_PROXY", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY")}
    assert forwarded() == GIVEN | extra
