"""The Ray cluster of a service from the command line: its own head, or a cluster to join."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import ray

from serve_app.shared_memory import SharedFiles

_EXIT_SECONDS = 10.0
_TRIES = 3  # attempts to start Ray here
_JOIN_SECONDS = 90.0
_HEAD = "node:__internal_head__"  # the resource that only Ray's head node has
_REASON = 120  # characters of an error on the progress line
_SAID = 2000  # characters of the output of a node that did not start

# `ray start` as a child that the kernel ends with its parent, however the parent ends (PR_SET_PDEATHSIG).
_NODE = """
import ctypes, signal
from ray.scripts import scripts
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
scripts.main()
"""


Progress = Callable[[str], None]


class Cluster(Protocol):
    """Where a service runs.

    Attributes:
        own: whether this process started the cluster.
        remote_head: the address of the cluster's head once it has started, if the head is on another host.
    """

    own: bool
    remote_head: str

    def start(self, progress: Progress) -> None:
        """Connect to the cluster; `ray` works in this process afterwards.

        Args:
            progress: called with the name of each stage.
        """

    def look_after(self) -> None:
        """Do the periodic work of a running service."""

    def stop(self) -> None:
        """Disconnect and end everything that `start` began. Never raises; a second call is fine."""


class OwnHead:
    """A Ray head of this process's own, with its own files.

    `own_head_environment` says what else makes the head private.

    Args:
        cpus: the least number of CPUs that the head offers, whatever the machine has.
        metrics_port: the port of the metrics; 0: any free port.
    """

    own = True
    remote_head = ""

    def __init__(self, cpus: int, metrics_port: int = 0) -> None:
        self._metrics_port = metrics_port or None
        self._cpus = max(cpus, os.cpu_count() or 1)
        self._folder: Path | None = None
        self._processes: set[psutil.Process] = set()
        self._shared = SharedFiles()

    def start(self, progress: Progress = lambda stage: None) -> None:
        """Start Ray, in several attempts.

        Ray gives its node 30 seconds to come up. A busy machine may need more.

        Raises:
            RuntimeError: no attempt succeeded; nothing is left of them.
        """
        for number in range(1, _TRIES + 1):
            try:
                self._start()
                return
            except (ValueError, TypeError):
                raise  # another attempt would fail in the same way
            except Exception as error:
                self.stop()
                if number == _TRIES:
                    raise RuntimeError(f"tried {_TRIES} times; the last time: {error}") from error
                first = str(error).strip().partition("\n")[0][:_REASON]
                progress(f"starting Ray again ({number + 1} of {_TRIES} tries; it did not come up: {first})")

    def _start(self) -> None:
        # Paths of sockets in this folder must stay under 108 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="interpose-", dir="/tmp"))
        # vLLM's sockets. In the machine's temporary folder they would outlive a killed process.
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._folder)
        with _own_signal_handlers():
            ray.init(
                address="local",
                num_cpus=self._cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=str(self._folder),
                _metrics_export_port=self._metrics_port,
            )

    def look_after(self) -> None:
        # A process whose parent has died is no longer a child of this process, but still belongs to the service.
        known = self._processes | set(psutil.Process().children(recursive=True))
        self._processes = {process for process in known if process.is_running()}
        self._shared.look_after(self._processes)

    def stop(self) -> None:
        self.look_after()
        with contextlib.suppress(Exception):
            ray.shutdown()
        _, alive = psutil.wait_procs(self._processes, timeout=_EXIT_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_EXIT_SECONDS)
        self._shared.remove()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class JoinedCluster:
    """A cluster that runs already.

    Where no node of the cluster runs on this host, a node without resources is started for this process. Nothing of the model
    is placed on that node, and it ends with the process.

    Args:
        address: host:port of the cluster's head.

    Raises:
        ValueError: the address has another form.
    """

    own = False

    def __init__(self, address: str) -> None:
        if address.startswith("ray://"):
            raise ValueError(
                f"RAY_ADDRESS={address} is a Ray client address, and Ray's client has no object store: set "
                "RAY_ADDRESS=HOST:6379 of the cluster's head, which this host joins as a node without resources"
            )
        if address != "auto" and ":" not in address:
            raise ValueError(f"RAY_ADDRESS={address}: it should be HOST:PORT of the cluster's head")
        self._address = address
        self.remote_head = ""
        self._node: subprocess.Popen[str] | None = None

    def start(self, progress: Progress = lambda stage: None) -> None:
        if self._address != "auto" and not _has_node(self._address):
            self._start_node()
        with _own_signal_handlers():
            ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        head = next(node for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"])["NodeManagerAddress"]
        self.remote_head = "" if head == ray.util.get_node_ip_address() else str(head)

    def _start_node(self) -> None:
        command = [sys.executable, "-c", _NODE, "start", f"--address={self._address}", "--num-cpus=0", "--num-gpus=0"]
        command += ["--disable-usage-stats", "--block"]
        with tempfile.TemporaryFile("w+") as output:
            # A process session of its own keeps Ctrl-C from this node: the service must still be taken off the cluster.
            self._node = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, start_new_session=True
            )
            deadline = time.monotonic() + _JOIN_SECONDS
            while True:
                output.seek(0)
                said = output.read()
                if "Ray runtime started" in said:
                    return
                if self._node.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(
                        f"this host could not join the cluster at RAY_ADDRESS={self._address}: {said[-_SAID:].strip()}"
                    )
                time.sleep(0.1)

    def look_after(self) -> None:
        pass

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            ray.shutdown()
        node, self._node = self._node, None
        if node is None:
            return
        parts: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            parts = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        try:
            node.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
        _, alive = psutil.wait_procs(parts, timeout=_EXIT_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _has_node(address: str) -> bool:
    """Whether a node of the cluster runs on this host.

    The node's command line contains the port of the cluster's head. The head's host has several names, so only the port is
    compared.
    """
    port = address.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        for argument in process.info["cmdline"] or ():
            name, _, value = argument.partition("=")
            if name in ("--gcs-address", "--gcs_address") and value.rpartition(":")[2] == port:
                return True
    return False


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put this process's signal handlers back: the handler of Ray's core aborts the process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
