"""A process that forks sandboxes has one thread; where it cannot begin, traces without trust are refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest

from executor.core.errors import Refusal
from executor.sandbox import pool
from executor.sandbox.first import ENVIRONMENT, environment
from executor.sandbox.pool import Pool
from executor.sandbox.zygote import Setup
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.sandbox.parts import Worker, plain
from tests.unit.executor.sandbox.parts import pool as pool_of_model

NO_MODEL = Setup(cast(Any, None), (8, 8), 1 << 20, 1 << 20)
_SINGLE = "from executor.sandbox.zygote import be_single\n"
_COUNT = "import os\ndef count(): return len(os.listdir('/proc/self/task'))\n"


def _run(code: str, **environment: str) -> str:
    """Run Python in a process of its own, and return its output with its errors."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout + done.stderr


def test_libraries_start_no_threads_by_the_environment_of_a_zygote() -> None:
    code = "import numpy, torch; numpy.ones((300, 300)) @ numpy.ones((300, 300)); torch.ones(300, 300) @ torch.ones(300, 300);"
    assert _run(_COUNT + code + "print(count())", **ENVIRONMENT) == "1\n"


@pytest.mark.parametrize("name", ["libcuda.so.1", "libnvidia-ml.so.1"])
def test_a_zygote_finds_no_driver_of_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would start a thread as soon as somebody asks how many GPUs there are."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/this/machine")
    made = environment()
    assert made["LD_LIBRARY_PATH"].endswith("sandbox/absent:/of/this/machine")
    assert "file too short" in _run(f"import ctypes; ctypes.CDLL({name!r})", **made)


def test_threads_that_a_library_ends_before_a_fork_are_ended() -> None:
    """OpenBLAS has a pool of threads, and ends it before a fork."""
    code = _COUNT + "import numpy\nbefore = count()\n" + _SINGLE + "be_single()\nprint(before > 1, count())"
    assert "True 1\n" in _run(code, **ENVIRONMENT | {"OPENBLAS_NUM_THREADS": "16"})


def test_threads_that_stay_are_named() -> None:
    code = (
        _SINGLE + "import threading\nthreading.Thread(target=threading.Event().wait, name='of a library', daemon=True)"
        ".start()\nbe_single()"
    )
    said = _run(code, **ENVIRONMENT)
    assert "RuntimeError: the process that forks sandboxes has 2 threads: " in said and "(of a library)" in said


def test_a_zygote_that_cannot_go_on_says_why() -> None:
    made = Pool()
    made.start(NO_MODEL)
    with pytest.raises(Refusal, match="the zygote cannot go on: AttributeError: .*'tree'") as refused:
        made.take()
    assert refused.value.code == pb.ERROR_CODE_PERMISSION_DENIED
    assert made._zygote is None


@pytest.mark.parametrize(
    ("begins", "why"),
    [
        ("raise SystemExit(3)", "the zygote has ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", "the zygote has ended by signal 11"),
        (
            "import sys; sys.path[:] = {path!r}; from executor.sandbox import first; "
            "sys.modules['executor.sandbox.zygote'] = None; first.begin({line})",
            "the zygote cannot go on: ModuleNotFoundError: .*executor.sandbox.zygote",
        ),
    ],
)
def test_a_zygote_that_does_not_begin_is_said(monkeypatch: pytest.MonkeyPatch, begins: str, why: str) -> None:
    monkeypatch.setattr(pool, "_START", begins)
    made = Pool()
    made.start(NO_MODEL)
    with pytest.raises(Refusal, match=why):
        made.take()


def test_a_machine_without_landlock_refuses_blocks_without_trust_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "missing", lambda: ["Landlock"])
    worker = Worker(pool_of_model())
    refused = worker.run("h = model.layers[1].output[0].save()")
    assert refused.failure is not None and refused.failure.code == pb.ERROR_CODE_PERMISSION_DENIED
    assert "lacks Landlock" in refused.failure.message
    assert [rows.tolist() for rows in refused.beside] == [rows.tolist() for rows in plain()]


def test_a_worker_with_many_threads_has_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "16")
    made = pool_of_model()
    try:
        assert not made.lacks
        ran = Worker(made).run("h = model.layers[1].output[0].save()")
        assert ran.failure is None and ran.saved["h"].tolist() == ran.outputs[0].tolist()
    finally:
        made.close()
