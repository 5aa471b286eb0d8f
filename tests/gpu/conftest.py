"""What is run where there is a GPU, and only there: `make test TESTS=tests/gpu`, or all of `tests/engine` with it.

Engines here are as they are deployed, compiled and with CUDA graphs, under each of vLLM's model runners.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from tests.engine.conftest import Bench

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
SIZES = [1, 2, 4, 8, 16]  # of batches that have a graph


@pytest.fixture(scope="module", params=["1", "0"], ids=["v2", "v1"])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """vLLM's choice of the model runner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
        yield request.param


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint, in a folder with its architecture's name."""
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)


def deployed(dtype: str) -> dict[str, object]:
    """Return the options of an engine with graphs for small batches."""
    return {"dtype": dtype, "enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": SIZES}}


@pytest.fixture(scope="module")
def bench(runner: str, checkpoint: Path) -> Iterator[Bench]:
    """An engine with graphs in float32, and the oracle."""
    bench = Bench(checkpoint, checkpoint.name, **deployed("float32"))
    yield bench
    assert bench.engine.interleaver.idle, "a trace left something behind"
    bench.engine.close()
