"""What holds for every test: no network for models, no clock for examples, and a short temporary directory that goes away."""

from __future__ import annotations

import os
import shutil
import tempfile

import hypothesis
import pytest

from interpose.contract.tracebacks import full_tracebacks

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",  # float32 matrices in attention kernels, which would be multiplied in tf32 on GPUs
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

_directory = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before anything that reads it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    full_tracebacks()  # of the library, whose mistakes tests are to show
    # An example may take as long as the machine is busy.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")
    # Ray and the engine put Unix sockets below it, and their paths may have about a hundred characters: hence not below
    # whatever TMPDIR says.
    directory = tempfile.mkdtemp(prefix="ip-", dir="/tmp")
    config.stash[_directory] = directory
    os.environ["TMPDIR"] = tempfile.tempdir = directory


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the temporary directory, unless a test failed and somebody may want to look into it."""
    if exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(session.config.stash[_directory], ignore_errors=True)
