"""On a GPU as on CPUs: what is killed comes back by itself, and nothing of it stays in shared memory or in the GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import interpose
from benchmarks.processes import ENGINE
from executor.cluster.shared_memory import mapped_by
from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.e2e.service import RunningService, wait_for
from tests.e2e.test_recovery import Background

PROMPT = [5, 400, 17, 99]
# An engine that starts again may have its context and its kernels' workspaces placed otherwise.
SLACK = 64 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service of a small llama in one worker, which starts soonest without graphs."""
    folder = tmp_path_factory.mktemp("service")
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 1 << 30,
    }
    checkpoint = write_demo_model(folder / "llama", "llama")
    model = {"name": "llama", "model": str(checkpoint), "engine": engine}
    running = RunningService(folder, {"models": [model], "sessions": {"warm": 1}}).wait()
    yield running
    assert running.stop() == 0


def taken() -> int:
    """Bytes of the GPU's memory that all processes have."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("part", ["LazyWorkerActor", ENGINE])
def test_what_is_killed_comes_back_and_leaves_nothing(service: RunningService, part: str) -> None:
    with interpose.connect(service.address, progress=False) as client:
        model = client.model("llama")
        with model.trace(PROMPT):
            before = model.model.layers[0].output[0].save()
        had = taken()
        session = service.open_session()
        running = Background(service, session)
        [victim] = service.processes(part)
        victim.kill()
        running.join(30)
        assert running.failure is not None
        assert running.failure.code == pb.ERROR_CODE_UNAVAILABLE
        wait_for(lambda: service.state("llama") != "RUNNING", 20)
        service.wait_until_running("llama")
        with model.trace(PROMPT):
            after = model.model.layers[0].output[0].save()
        assert torch.equal(before, after)
        service.close_session(session)
    wait_for(lambda: taken() < had + SLACK, 20)
    assert not mapped_by(process.pid for process in service.processes())
