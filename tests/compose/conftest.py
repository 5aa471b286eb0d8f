"""The image, built once, and one cluster of it for the tests, which change it in the order in which they stand."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.compose import image
from tests.compose.cluster import START_SECONDS, Cluster
from tests.compose.docker import Docker, NoDocker


@pytest.fixture(scope="session")
def docker() -> Docker:
    try:
        return Docker()
    except NoDocker as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def built(docker: Docker) -> str:
    """The name of the image for CPUs, as the Dockerfile makes it now."""
    try:
        image.build(docker)
    except NoDocker as error:
        pytest.exit(str(error), returncode=1)
    return image.NAME


@pytest.fixture(scope="session")
def cluster(docker: Docker, built: str) -> Iterator[Cluster]:
    """A head and two workers, started by `docker compose up`, and a trace from this machine has worked."""
    cluster = Cluster(docker)
    start = time.monotonic()
    try:
        cluster.compose("up", "--detach")
        print("\n".join(cluster.smoke(START_SECONDS).splitlines()[-2:]))
        print(f"docker compose up: a trace works after {time.monotonic() - start:.0f} s", flush=True)
        yield cluster
    finally:
        cluster.down()
