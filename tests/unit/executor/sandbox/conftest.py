"""One zygote for the tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from executor.sandbox.pool import Pool
from tests.unit.executor.sandbox.parts import Worker, pool


@pytest.fixture(scope="package")
def processes() -> Iterator[Pool]:
    made = pool()
    gc.collect()
    gc.freeze()  # as a worker does when it has loaded its model
    yield made
    gc.unfreeze()
    made.close()


@pytest.fixture
def worker(processes: Pool) -> Worker:
    return Worker(processes)
