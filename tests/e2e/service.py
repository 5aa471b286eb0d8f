"""A whole service for tests: the real command in a process of its own, and everything that it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import yaml

from benchmarks.processes import joining, title
from interpose.contract.errors import ServiceFailure
from interpose.contract.version import PROTOCOL
from interpose.rpc.grpc_errors import from_rpc_error
from interpose.v1 import service_pb2, service_pb2_grpc
from interpose.v1 import trace_pb2 as pb

START_SECONDS = 400.0
STOP_SECONDS = 60.0

# The stores themselves are asked: of values that are dropped while Ray fails to write them to a full disk, it counts the bytes as
# in use of the nodes' resource for good, when there is nothing of them any more (`LocalObjectManager`, in Ray 2.60).
_HELD = """
import json, ray
from ray._private.internal_api import node_stats
from ray.util import placement_group_table
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
nodes = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]]
size = sum(node_stats(*node, include_memory_info=False).store_stats.object_store_bytes_used for node in nodes)
groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps([size, len(groups)]))
"""


def clean_environment() -> dict[str, str]:
    """This process's environment without what configures Ray or the service."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INTERPOSE_"))}


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Joining:
    """A process beside a service, which goes on at each line that it is given. Leaving it ends it."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __enter__(self) -> Joining:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self, seconds: float) -> str:
        """Return the output up to the end of the process, which must end well."""
        output, errors = self._process.communicate(timeout=seconds)
        assert self._process.returncode == 0, output + errors
        return output

    def read_until(self, line: str) -> None:
        """Wait until it prints a line."""
        for printed in self._stdout:
            if printed.strip() == line:
                return
        raise AssertionError(self._process.communicate()[1])

    def go_on(self) -> None:
        """Give it a line."""
        self._stdin.write("\n")
        self._stdin.flush()


class RunningService:
    """`interpose serve` in a process of its own.

    Args:
        folder: for its configuration and its output.
        settings: the configuration file's content; the port is chosen here.
        arguments: further arguments of the command.
        environment: added to that of the command.
        python: the interpreter of the command.

    Attributes:
        address: where clients connect.
        http: the base of the OpenAI-compatible endpoint, unless the settings have a port of their own.
        process: of the command.
        config: the configuration file.
        metadata: of the calls that ask for its status.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, object],
        *arguments: str,
        environment: dict[str, str] | None = None,
        python: Path | str = sys.executable,
    ) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        http_port = free_port()
        settings = {"http": {"port": http_port}, **settings}
        self.http = f"http://127.0.0.1:{http_port}/v1"
        self._output = folder / "service.log"
        self.config = config = folder / "service.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [str(python), "-m", "interpose.cli", "serve", "--config", str(config), "--port", str(port)]
        with self._output.open("w") as output:
            self._popen = subprocess.Popen(
                [*command, *arguments], stdout=output, stderr=output, env=clean_environment() | (environment or {})
            )
        self.process = psutil.Process(self._popen.pid)
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.max_receive_message_length", -1)])
        self.stub = service_pb2_grpc.InterposeStub(self.channel)
        self.metadata: tuple[tuple[str, str], ...] = ()

    @property
    def output(self) -> str:
        """The output of the process."""
        return self._output.read_text()

    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._popen.poll() is not None

    def wait(self) -> RunningService:
        """Wait until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while f"at {self.address}" not in self.output:
            if self._popen.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the service did not start:\n{self.output}")
            time.sleep(0.2)
        return self

    def wait_until_running(self, model: str, seconds: float = START_SECONDS) -> None:
        """Wait until a model's engine can run traces; on a busy machine one that starts can keep an answer waiting."""

        def running() -> bool:
            try:
                return self.state(model) == "RUNNING"
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                return False

        wait_for(running, seconds)

    def state(self, model: str) -> str:
        """LOADING, RUNNING or UNHEALTHY."""
        return next(one.state for one in self.status().models if one.name == model)

    def status(self) -> service_pb2.StatusReply:
        """What `interpose status` shows."""
        return self.stub.Status(service_pb2.StatusRequest(), metadata=self.metadata, timeout=20)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Everything it started that still runs, and has `name` in its title."""
        found = []
        for process in self.process.children(recursive=True):
            try:
                if name in title(process):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def held(self) -> tuple[int, int]:
        """The bytes that the object stores hold now, and how many placement groups there are: asked by a process that joins the
        cluster for it."""
        size, groups = json.loads(self.joined(_HELD).splitlines()[-1])
        return size, groups

    def object_store_bytes(self) -> int:
        """What the object stores hold now."""
        return self.held()[0]

    def joined(self, script: str, *arguments: str, seconds: float = 60.0) -> str:
        """What a script prints that runs in a process of its own on the service's cluster."""
        with self.joining(script, *arguments) as process:
            return process.read(seconds)

    def joining(self, script: str, *arguments: str) -> Joining:
        """A process of its own on the service's cluster that runs a script."""
        return Joining([sys.executable, "-c", script, *arguments], joining(self.processes()))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it as an operator does; returns its exit status. Fails if it left a process or shared memory."""
        self.channel.close()
        children = self.processes() if self._popen.poll() is None else []
        shared = shared_memory_of(children)
        if self._popen.poll() is None:
            self._popen.send_signal(number)
        try:
            status = self._popen.wait(STOP_SECONDS)
        finally:
            _, alive = psutil.wait_procs(children, timeout=5)
            alive = [process for process in alive if not ended(process)]
            for process in alive:
                process.kill()
            self._popen.kill()
        assert not alive, f"left running: {[process.name() for process in alive]}"
        left = [path for path in shared if os.path.exists(path)]
        assert not left, f"left in shared memory: {left}"
        return status

    # Traces without the client library, for what a client library would not send

    def submit(self, trace: pb.Trace, session: str = "", **options: object) -> list[pb.Event]:
        """Run a trace to its end.

        Raises:
            ServiceFailure: the trace as a whole failed.
        """
        request = service_pb2.SubmitRequest(protocol=PROTOCOL, session_id=session, trace=trace)
        try:
            return [event for event in self.stub.Submit(request, timeout=120, **options) if event.WhichOneof("kind")]
        except grpc.RpcError as error:
            raise failure_of(error) from None

    def open_session(self) -> str:
        """Open a session; returns its id."""
        return self.stub.OpenSession(service_pb2.OpenSessionRequest(), timeout=30).session_id

    def close_session(self, session: str) -> None:
        """Close a session."""
        self.stub.CloseSession(service_pb2.CloseSessionRequest(session_id=session), timeout=30)

    def fetch(self, session: str, blob_id: str, **window: int) -> bytes:
        """The bytes of a saved value."""
        request = service_pb2.FetchRequest(session_id=session, blob_id=blob_id, **window)
        try:
            return b"".join(chunk.data for chunk in self.stub.Fetch(request, timeout=120))
        except grpc.RpcError as error:
            raise failure_of(error) from None


def failure_of(error: grpc.RpcError) -> ServiceFailure:
    """The failure that a call ended with; fails if it carries none."""
    for key, value in error.trailing_metadata() or ():
        if key == "interpose-failure-bin":
            return ServiceFailure(pb.Failure.FromString(value))
    raise AssertionError(f"a failed call without a Failure: {from_rpc_error(error)}")


def ended(process: psutil.Process) -> bool:
    """Whether nothing is left of a process but an entry for the process that adopted it, which has to remove the entry."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: object, seconds: float) -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)


def shared_memory_of(processes: list[psutil.Process]) -> list[str]:
    """The files in shared memory that processes have mapped and that are still there by name."""
    paths: set[str] = set()
    for process in processes:
        try:
            paths.update(region.path for region in process.memory_maps() if region.path.startswith("/dev/shm/"))
        except psutil.Error:
            continue
    return sorted(path for path in paths if os.path.exists(path))
