"""The image `interpose:cpu`, built as its Dockerfile says, with what pip here has for pip."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from tests.compose.base_images import make_available
from tests.compose.docker import Docker
from tests.compose.pip_settings import build_arguments

NAME = "interpose:cpu"


def build(docker: Docker, tag: str = NAME) -> None:
    """Build the image; print what it is built from, how long that took, and what it weighs.

    Raises:
        NoDocker: something is missing for it on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="interpose-compose-") as name:
        folder = Path(name)
        for image, origin in make_available(docker, folder).items():
            print(f"{image}: {origin}, {megabytes(docker, image)} MB", flush=True)
        start = time.monotonic()
        with build_arguments(folder) as arguments:
            docker.build("--target", "cpu", "--tag", tag, *arguments, ".", seconds=3600)
    print(f"{tag}: built in {time.monotonic() - start:.0f} s, {megabytes(docker, tag)} MB", flush=True)


def megabytes(docker: Docker, name: str) -> int:
    """The size of an image with all its layers, as `docker images` shows it."""
    return round(int(docker("image", "inspect", "--format", "{{.Size}}", name)) / 1e6)


def configuration(docker: Docker, name: str) -> dict[str, object]:
    """What the image says of how it runs: Env, User, Cmd, Healthcheck and so on."""
    config: dict[str, object] = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", name))
    return config


if __name__ == "__main__":
    build(Docker())
