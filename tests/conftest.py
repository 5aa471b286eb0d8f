"""What holds for every test: no network for models, and a short temporary directory that goes away again."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",  # float32 matrices in attention kernels, which would be multiplied in tf32 on GPUs
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

_directory = pytest.StashKey[str]()


def _one_core() -> dict[str, str]:
    """Return what keeps this process, if it is one of several that run tests, on a core of its own.

    vLLM binds its threads to the first cores it sees: engines of two processes would share one and leave the other idle.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not number:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cores[int(number) % len(cores)])}


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before anything that reads it is imported."""
    for name, value in {**ENVIRONMENT, **_one_core()}.items():
        os.environ.setdefault(name, value)
    # Ray and the engine put Unix sockets below it, and their paths may have about a hundred characters: hence not below
    # whatever TMPDIR says.
    directory = tempfile.mkdtemp(prefix="ip-", dir="/tmp")
    config.stash[_directory] = directory
    os.environ["TMPDIR"] = tempfile.tempdir = directory


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the temporary directory, unless a test failed and somebody may want to look into it."""
    if exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(session.config.stash[_directory], ignore_errors=True)
