"""The Ray that a service started from the command line runs on: a head of its own, or a cluster to join."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil
import ray

from serve_app.shared_memory import mapped_by, remove

_EXIT_SECONDS = 10.0


class Cluster(Protocol):
    """Where a service runs."""

    def start(self) -> None:
        """Connect; afterwards `ray` works in this process."""

    def look_after(self) -> None:
        """Do what has to be done now and then while the service runs."""

    def stop(self) -> None:
        """Disconnect and end everything that `start` began. Never raises, and twice is fine."""


class OwnHead:
    """A Ray head of this process's own, with its own files; `own_head_environment` says what else makes it private.

    Args:
        cpus: at least this many, whatever the machine has.
    """

    def __init__(self, cpus: int) -> None:
        self._cpus = max(cpus, os.cpu_count() or 1)
        self._folder: Path | None = None
        self._shared_memory: set[Path] = set()

    def start(self) -> None:
        try:
            self._start()
        except Exception:
            # Ray gives its node 30 seconds to come up, which a busy machine may not keep to.
            self.stop()
            self._start()

    def _start(self) -> None:
        # Paths of sockets below it must stay under 108 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="interpose-", dir="/tmp"))
        # vLLM's sockets; in the machine's temporary folder they would outlive a process that is killed.
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._folder)
        with _own_signal_handlers():
            ray.init(
                address="local",
                num_cpus=self._cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=str(self._folder),
            )

    def look_after(self) -> None:
        self._shared_memory |= mapped_by(process.pid for process in psutil.Process().children(recursive=True))

    def stop(self) -> None:
        self.look_after()
        children = psutil.Process().children(recursive=True)
        with contextlib.suppress(Exception):
            ray.shutdown()
        _, alive = psutil.wait_procs(children, timeout=_EXIT_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_EXIT_SECONDS)
        remove(self._shared_memory)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class JoinedCluster:
    """A cluster that runs already.

    Args:
        address: host:port of its head.

    Raises:
        ValueError: the address is of another kind.
    """

    def __init__(self, address: str) -> None:
        if address.startswith("ray://"):
            raise ValueError(
                f"RAY_ADDRESS={address} is a Ray client address, and Ray's client has no object store: start a node of "
                "the cluster here (`ray start --address=HOST:6379 --num-cpus=0`) and set RAY_ADDRESS=HOST:6379"
            )
        if address != "auto" and ":" not in address:
            raise ValueError(f"RAY_ADDRESS={address}: it should be HOST:PORT of the cluster's head")
        self._address = address

    def start(self) -> None:
        with _own_signal_handlers():
            ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")

    def look_after(self) -> None:
        pass

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            ray.shutdown()


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put this process's signal handlers back: Ray's core replaces them by one that aborts the process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
