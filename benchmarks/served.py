"""A whole service for a benchmark: a demo model behind `interpose serve` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from interpose.cli.demo_model import write_demo_model

START_SECONDS = 400.0
STOP_SECONDS = 60.0


@contextlib.contextmanager
def served(tensor_parallel_size: int, warm: int, engine: Mapping[str, object] | None = None) -> Iterator[str]:
    """Serve a demo llama for the time of the `with` block, which gets the address.

    Args:
        tensor_parallel_size: workers, each with its share of the machine's cores.
        warm: how many sessions the service keeps ready.
        engine: further arguments of the engine, by vLLM's names.

    Raises:
        RuntimeError: it does not start, with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_demo_model(Path(folder) / "llama")
        port = _free_port()
        model = {
            "name": "llama",
            "model": str(checkpoint),
            "tensor_parallel_size": tensor_parallel_size,
            "engine": {"dtype": "float32", **(engine or {})},
        }
        settings = {"models": [model], "sessions": {"warm": warm}, "grpc": {"port": port}}
        config = Path(folder) / "service.yaml"
        config.write_text(json.dumps(settings))  # JSON is YAML
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INTERPOSE_"))}
        output = Path(folder) / "service.log"
        with output.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "interpose.cli", "serve", "--config", str(config)],
                stdout=log,
                stderr=log,
                env=environment,
                # Ctrl-C reaches it through the end of this block alone.
                start_new_session=True,
            )
        try:
            _wait(process, output)
            yield f"127.0.0.1:{port}"
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "interpose: serving" not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the service did not start:\n{output.read_text()}")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise RuntimeError(f"the service did not stop within {STOP_SECONDS:g} s and was killed") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
