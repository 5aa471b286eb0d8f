"""The commands `docker` and `docker compose`, whichever of their versions this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = (
    "make test-compose needs Docker: {what}. On Debian: apt-get install docker.io docker-compose, and dockerd, which needs "
    "root, or membership in the group `docker`"
)


class NoDocker(Exception):
    """This machine cannot build the image or run containers; the message says what is missing."""


def run(*command: str, environment: Mapping[str, str] | None = None, seconds: float = 600) -> str:
    """Run a command in the repository's folder; return what it prints.

    Raises:
        AssertionError: it failed; the message ends with what it printed.
    """
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}: status {result.returncode}\n{result.stdout[-8000:]}"
    return result.stdout


def _answers(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0


def _programs(name: str) -> list[str]:
    """Every program of that name on PATH, in its order."""
    found = (shutil.which(name, path=folder) for folder in os.environ.get("PATH", "").split(os.pathsep))
    return [path for path in dict.fromkeys(found) if path]


def _with_buildkit(programs: Sequence[str]) -> str:
    """The first of several `docker` that has BuildKit: the plugin buildx, or, before Docker 23, its own.

    Raises:
        NoDocker: none has.
    """
    for program in programs:
        if _answers(program, "buildx", "version"):
            return program
        version = run(program, "version", "--format", "{{.Client.Version}}").strip()
        if int(version.split(".")[0]) < 23:
            return program
    raise NoDocker(MISSING.format(what="no `docker` here has BuildKit; its plugin is `buildx`"))


class Docker:
    """What talks to the Docker daemon.

    Attributes:
        compose: `docker compose` where there is that plugin, `docker-compose` otherwise.

    Raises:
        NoDocker: a command is missing, or no daemon answers.
    """

    def __init__(self) -> None:
        programs = _programs("docker")
        if not programs:
            raise NoDocker(MISSING.format(what="there is no command `docker`"))
        if not _answers(programs[0], "info", "--format", "{{.ServerVersion}}"):
            raise NoDocker(MISSING.format(what="no daemon answers `docker info`"))
        self._docker = programs[0]
        self._builder = _with_buildkit(programs)
        if _answers(programs[0], "compose", "version"):
            self.compose = [programs[0], "compose"]
        elif _programs("docker-compose"):
            self.compose = ["docker-compose"]
        else:
            raise NoDocker(MISSING.format(what="there is neither `docker compose` nor `docker-compose`"))

    def __call__(self, *arguments: str, seconds: float = 600) -> str:
        """Run `docker` with these arguments; return what it prints."""
        return run(self._docker, *arguments, seconds=seconds)

    def lines(self, *arguments: str) -> list[str]:
        """The words of each line that `docker` prints."""
        return self(*arguments).split()

    def has_image(self, name: str) -> bool:
        """Whether the daemon has an image."""
        return _answers(self._docker, "image", "inspect", name)

    def pull(self, name: str) -> bool:
        """Pull an image; return whether that worked."""
        return _answers(self._docker, "pull", "--quiet", name)

    def build(self, *arguments: str, seconds: float) -> str:
        """Run `docker build` with BuildKit."""
        return run(self._builder, "build", *arguments, environment={"DOCKER_BUILDKIT": "1"}, seconds=seconds)
