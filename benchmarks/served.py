"""A whole service for a benchmark: a model behind `interpose serve` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from interpose.cli.demo_model import write_demo_model

START_SECONDS = 400.0
STOP_SECONDS = 60.0
PORTS = range(20000, 30000)


class Service:
    """A service that starts when the object is made; `address` waits until it serves.

    Args:
        tensor_parallel_size: number of workers, each with its share of the machine's cores.
        warm: session actors that the service keeps ready.
        engine: further arguments of the engine, by vLLM's names; by default float32 and compiled.
        checkpoint: the model's folder; by default a demo llama.
        sessions: further settings of sessions.
        limits: limits of the model.
        tenants: names and API keys of the tenants.
        model: further settings of the model.
        settings: further settings of the service.

    Attributes:
        config: the service's configuration file.
    """

    def __init__(
        self,
        tensor_parallel_size: int,
        warm: int,
        engine: Mapping[str, object] | None = None,
        checkpoint: Path | None = None,
        sessions: Mapping[str, object] | None = None,
        limits: Mapping[str, object] | None = None,
        tenants: Sequence[Mapping[str, object]] = (),
        model: Mapping[str, object] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._stopping = False
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        checkpoint = checkpoint or write_demo_model(folder / "llama")
        self._port = free_port()
        served = {
            "name": "llama",
            "model": str(checkpoint),
            "tensor_parallel_size": tensor_parallel_size,
            "engine": {"dtype": "float32", "enforce_eager": False, **(engine or {})},
            "limits": {**(limits or {})},
            **(model or {}),
        }
        given: dict[str, object] = {
            "models": [served],
            "sessions": {"warm": warm, **(sessions or {})},
            "grpc": {"port": self._port},
            **(settings or {}),
        }
        if tenants:
            given["tenants"] = list(tenants)
        self.config = config = folder / "service.yaml"
        config.write_text(json.dumps(given))  # JSON is YAML
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INTERPOSE_"))}
        self._output = folder / "service.log"
        with self._output.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "interpose.cli", "serve", "--config", str(config)],
                stdout=log,
                stderr=log,
                env=environment,
                # Ctrl-C reaches the service through `close` alone.
                start_new_session=True,
            )

    def address(self) -> str:
        """Return the address for clients, as soon as they can connect.

        Raises:
            RuntimeError: the service does not start; with its output.
        """
        deadline = time.monotonic() + START_SECONDS
        while "interpose: serving" not in self._output.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start:\n{self._output.read_text()}")
            time.sleep(0.2)
        return f"127.0.0.1:{self._port}"

    @property
    def process(self) -> psutil.Process:
        """The process of the service's command."""
        return psutil.Process(self._process.pid)

    def stop(self) -> None:
        """Ask the service to end, without waiting for it. Idempotent."""
        if not self._stopping:
            self._stopping = True
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the service.

        Raises:
            RuntimeError: the service had to be killed.
        """
        self.stop()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise RuntimeError(f"the service did not stop within {STOP_SECONDS:g} s and was killed") from None
        finally:
            self._folder.cleanup()


@contextlib.contextmanager
def served(tensor_parallel_size: int, warm: int, engine: Mapping[str, object] | None = None) -> Iterator[str]:
    """Serve a demo llama during the `with` block, which gets the address.

    See `Service` for the arguments.
    """
    service = Service(tensor_parallel_size, warm, engine)
    try:
        yield service.address()
    finally:
        service.close()


def free_port() -> int:
    """Return a free port that the system gives to no connection meanwhile."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")
