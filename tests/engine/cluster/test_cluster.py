"""The executor finds Ray three ways: it is in a cluster already, RAY_ADDRESS names one, or it starts its own; of that nothing is
left when it stops.

These tests are in one file, and so run one after the other: heads that start at the same time may choose the same port.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest

from executor.cluster.placement import connect
from serve_app.environment import own_head_environment

_HEAD = """
import sys, time, ray
from executor.cluster.placement import connect
ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", _temp_dir=sys.argv[1])
before = ray.get_runtime_context().gcs_address
connect()
assert ray.get_runtime_context().gcs_address == before
print(before, flush=True)
sys.stdin.read()
"""
_JOIN = """
import ray
from executor.cluster.placement import connect
connect()
print(ray.get_runtime_context().gcs_address, flush=True)
ray.shutdown()
"""
_OWN = """
import subprocess, sys, time
import psutil
from serve_app import cluster

cluster._EXIT_SECONDS = 0.5
head = cluster.OwnHead(1)
sleep = "import time; print('here', flush=True); time.sleep(600)"
start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"
parent = subprocess.Popen([sys.executable, "-c", start, sleep], stdout=subprocess.PIPE, text=True)
assert parent.stdout.readline() == "here\\n"
(orphan,) = psutil.Process(parent.pid).children()
head.look_after()
parent.kill()
parent.wait()
assert orphan.is_running() and orphan not in psutil.Process().children(recursive=True)
head.stop()
head.stop()
print(orphan.pid)
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """An environment of no other Ray on this machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**clean, **own_head_environment(), "PYTHONPATH": os.getcwd()}


@pytest.fixture(scope="module")
def head(environment: dict[str, str]) -> Iterator[str]:
    """A running cluster's address; its process has called `connect` in it."""
    with tempfile.TemporaryDirectory(prefix="ip-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with subprocess.Popen(
            [sys.executable, "-c", _HEAD, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            yield process.stdout.readline().strip()


def join(environment: dict[str, str], folder: str) -> str:
    """The address of the cluster that a new process gets to."""
    # Sockets' paths are limited, so the folder is one level below /tmp.
    command = [sys.executable, "-c", _JOIN]
    result = subprocess.run(
        command, env={**environment, "RAY_TMPDIR": folder}, capture_output=True, text=True, timeout=170
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_a_cluster_that_the_process_is_in_is_kept(head: str) -> None:
    assert ":" in head


def test_the_address_in_the_environment_is_joined(head: str, environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="ip-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        assert join({**environment, "RAY_ADDRESS": head}, folder) == head


def test_without_any_a_fresh_one_is_started(head: str, environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="ip-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        assert join(environment, folder) not in ("", head)


def test_a_client_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(ValueError, match="Ray client address"):
        connect()


def test_a_process_that_has_lost_its_parent_is_ended_too() -> None:
    """A process of its own, as everything below it is ended."""
    result = subprocess.run([sys.executable, "-c", _OWN], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    orphan, deadline = int(result.stdout), time.monotonic() + 10
    while psutil.pid_exists(orphan):  # until its new parent takes leave of it
        assert time.monotonic() < deadline
        time.sleep(0.1)
