"""Why an engine does not start: the error that caused it, and whether another try can succeed."""

from __future__ import annotations

import logging
import os
import pickle

import pytest
from pydantic import BaseModel
from ray.exceptions import ActorDiedError, RayTaskError

from executor.cluster.start_failure import CannotStart, StartFailure, failure_of, leave_note, noted, of_workers

CORE = logging.getLogger("vllm.v1.engine.core")


class Config(BaseModel):
    """Refuses an architecture as vLLM does."""

    def model_post_init(self, context: object) -> None:
        raise ValueError(UNKNOWN)


UNKNOWN = (
    "Model architectures ['LamaForCausalLM'] are not supported for now. Supported architectures: "
    "dict_keys(['LlamaForCausalLM', 'GPT2LMHeadModel'])"
)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """An exception that was raised from another one."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("dtype float8 is unknown"), "dtype float8 is unknown"),
        (KeyError("layers.0.weight"), "KeyError: 'layers.0.weight'"),
        (AssertionError(), "AssertionError"),
        (MemoryError("4 GiB"), "MemoryError: 4 GiB"),
        (
            RuntimeError(
                "Worker failed with error 'CUDA out of memory', please check the stack trace above for the root cause"
            ),
            "RuntimeError: CUDA out of memory",
        ),
        (
            raised(RuntimeError("cannot load"), FileNotFoundError("model.bin")),
            "RuntimeError: cannot load (because of FileNotFoundError: model.bin)",
        ),
        (
            RayTaskError("initialize", "Traceback …", AssertionError("shapes differ")).as_instanceof_cause(),
            "AssertionError: shapes differ",
        ),
        (ValueError("x" * 5000), "x" * 2000 + " …"),
    ],
)
def test_what_would_fail_again_is_permanent(error: BaseException, reason: str) -> None:
    assert failure_of(error) == StartFailure(reason, permanent=True)


def test_an_unknown_architecture_comes_with_near_misses_and_without_all_others() -> None:
    with pytest.raises(ValueError) as caught:
        Config()
    assert failure_of(caught.value) == StartFailure(
        "vLLM does not know the architecture ['LamaForCausalLM'], which the model's config.json names; did you mean "
        "LlamaForCausalLM?",
        permanent=True,
    )


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ConnectionResetError("by peer"),
        TimeoutError("loading the model in the workers took longer than 600 s"),
        RuntimeError("cancelled"),
        RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.2]:3456"),
        RuntimeError(
            "Worker failed with error 'NCCL error: unhandled system error', please check the stack trace above"
        ),
        raised(RuntimeError("cannot load"), ActorDiedError()),
        CannotStart(StartFailure("the node is gone", permanent=False)),
    ],
)
def test_faults_of_processes_and_networks_pass(error: BaseException) -> None:
    assert not failure_of(error).permanent


def test_the_worker_that_caused_it_is_named() -> None:
    errors = {0: RuntimeError("Connection closed by peer"), 1: ValueError("model.safetensors is cut off")}
    expected = StartFailure("loading, worker 1: model.safetensors is cut off", permanent=True)
    assert of_workers(errors, "loading") == expected
    assert of_workers({3: ConnectionError("gone")}, "loading").reason == "loading, worker 3: ConnectionError: gone"


def test_the_engines_process_leaves_its_reason_for_the_one_that_started_it() -> None:
    before = list(CORE.handlers)
    try:
        with pytest.raises(CannotStart) as caught, noted():
            leave_note()  # in the other process, whose environment is this one's
            try:
                raise ValueError("too little memory for the cache")
            except ValueError:
                CORE.exception("EngineCore failed to start.")
            raise RuntimeError(
                "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
            )
        assert caught.value.failure == StartFailure("too little memory for the cache", permanent=True)
        assert "INTERPOSE_START_NOTE" not in os.environ
        assert pickle.loads(pickle.dumps(caught.value)).failure == caught.value.failure
    finally:
        CORE.handlers[:] = before


def test_a_process_that_ends_without_a_word_may_be_started_again() -> None:
    with pytest.raises(CannotStart) as caught, noted():
        raise RuntimeError(
            "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"
        )
    assert not caught.value.failure.permanent and "-9" in str(caught.value)
    with pytest.raises(KeyError, match="another"), noted():
        raise KeyError("another")
