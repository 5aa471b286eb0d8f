"""The cluster of docker-compose.yml, as a project of its own beside any other on this machine."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import interpose
from interpose.contract.errors import InterposeError
from tests.compose.docker import Docker, run
from tests.e2e.service import free_port

START_SECONDS = 400.0


class Cluster:
    """A head and two workers in containers.

    Attributes:
        name: of the project; its containers, networks and volumes have it as a label.
        address: where clients of this machine connect.
        environment: of a process that connects.
    """

    def __init__(self, docker: Docker) -> None:
        self.docker = docker
        self.name = f"interpose-test-{os.getpid()}"
        port, key = free_port(), secrets.token_hex(16)
        self.address = f"localhost:{port}"
        self.environment = {"INTERPOSE_ADDRESS": self.address, "INTERPOSE_API_KEY": key}
        self._variables = {
            "PORT": str(port),
            "INTERPOSE_TENANTS": json.dumps([{"name": "tester", "api_key": key}]),
            "COMPOSE_PROJECT_NAME": self.name,
            "COMPOSE_PROFILES": "cpu",
        }

    def compose(self, *arguments: str, seconds: float = 300) -> str:
        """Run `docker compose` with these arguments on the project; return what it prints."""
        return run(*self.docker.compose, *arguments, environment=self._variables, seconds=seconds)

    def containers(self, service: str = "") -> list[str]:
        """Ids of the project's containers, running or not; of one service, if named."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [word for label in labels for word in ("--filter", label)]
        return self.docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()

    def inspect(self, service: str) -> dict[str, Any]:
        """What Docker says of a service's container."""
        (container,) = self.containers(service)
        (shown,) = json.loads(self.docker("inspect", container))
        return dict(shown)

    def inside(self, service: str, *command: str) -> str:
        """Run a command in a service's container; return what it prints."""
        (container,) = self.containers(service)
        return self.docker("exec", container, *command)

    def processes(self, service: str) -> list[str]:
        """The command lines of a container's processes."""
        return self.inside(service, "ps", "-eo", "args", "--no-headers").splitlines()

    def logs(self) -> str:
        """The end of what each container printed."""
        return self.compose("logs", "--no-color", "--tail=60")

    def smoke(self, seconds: float) -> str:
        """Run examples/smoke.py here, beside the containers: it waits for the model; return what it prints.

        Raises:
            AssertionError: a trace failed, or the service did not come.
        """
        command = [sys.executable, "examples/smoke.py", "--wait", str(seconds)]
        try:
            return run(*command, environment=self.environment, seconds=seconds + 120)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def client(self) -> interpose.Client:
        """A client of the service."""
        return interpose.connect(self.address, api_key=self.environment["INTERPOSE_API_KEY"], progress=False)

    def down(self) -> None:
        """Remove everything of the project."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "40")

    def left(self) -> list[str]:
        """Names of what there still is of the project: containers, networks, volumes."""
        label = ["--filter", f"label=com.docker.compose.project={self.name}", "--quiet"]
        return [
            *self.docker("ps", "--all", *label).split(),
            *self.docker("network", "ls", *label).split(),
            *self.docker("volume", "ls", *label).split(),
        ]


def until(seen: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until something is so; return how many seconds that took.

    Raises:
        AssertionError: it never was.
    """
    start = time.monotonic()
    while not seen():
        assert time.monotonic() - start < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)
    return time.monotonic() - start


def answers(cluster: Cluster) -> bool:
    """Whether a short trace works now."""
    try:
        with cluster.client() as client:
            model = client.model()
            with model.trace("The Eiffel Tower is in", max_tokens=1):
                model.logits.output.save()
        return True
    except InterposeError:
        return False
