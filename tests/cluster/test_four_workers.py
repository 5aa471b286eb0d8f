"""Two tensor-parallel ranks in each of two pipeline stages, served: four workers of the lazy executor in one placement group.

Beside what is only to be seen here, the tests of two stages: an early layer is read and a late one written, saves come once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import interpose
from tests.cluster.matrix import WORKER
from tests.e2e.alone.test_pipeline import (  # noqa: F401
    model,
    test_a_stream_has_what_each_step_saved,
    test_an_early_layer_is_read_and_a_late_one_written,
    test_an_error_on_one_stage_is_the_users_own,
    test_saves_of_both_stages_come_once,
)
from tests.e2e.service import RunningService
from tests.e2e.test_fidelity import PROMPTS, Served, check_everything, read_everything
from tests.oracle import Oracle

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def staged(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    llama = {
        "name": "llama",
        "model": str(checkpoints["llama"]),
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "engine": {"dtype": "float32", "enforce_eager": True},
        "limits": {"step_seconds": 20.0, "inline_bytes": 1024},
    }
    settings: dict[str, object] = {"models": [llama], "sessions": {"warm": 1}}
    running = RunningService(tmp_path_factory.mktemp("four"), settings).wait()
    yield running
    assert running.stop() == 0


def test_four_workers_have_one_placement_group(staged: RunningService, model: Any) -> None:  # noqa: F811
    assert model._description.tensor_parallel_size == 2
    assert len(staged.processes(WORKER)) == 4
    assert staged.held()[1] == 1


def test_everything_is_read(staged: RunningService, checkpoints: dict[str, Path]) -> None:
    with interpose.connect(staged.address, progress=False) as client:
        served = Served(client, "llama", checkpoints["llama"], Oracle(checkpoints["llama"]))
        for prompt in PROMPTS:
            check_everything(served, prompt, *read_everything(served, prompt))
