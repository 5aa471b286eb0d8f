"""What the tests of replicas, nodes and faults have in common with those of one service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import checkpoints, with_tenants
from tests.e2e.service import RunningService

__all__ = ["checkpoints"]


@pytest.fixture(scope="package")
def second(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with tenants whose replicas come and go; their blocks tell the process that they run in, and read files."""
    yield from with_tenants(checkpoints["llama"], tmp_path_factory.mktemp("second"), trust="code")
