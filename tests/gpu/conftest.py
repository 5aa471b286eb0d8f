"""What is run where there is a GPU, and only there: `make test TESTS=tests/gpu`, or all of `tests/engine` with it.

Engines here are as they are deployed, compiled and with CUDA graphs, under each of vLLM's model runners.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled

from interpose.cli.demo_model import write_demo_model
from tests.engine.conftest import Bench
from tests.engine.fidelity.test_fidelity import PROMPTS

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
OVER_TWO = ["test_pipeline.py", "test_lora_over_two_ranks.py", "test_tables_over_two_ranks.py"]
collect_ignore = [] if torch.cuda.device_count() > 1 else OVER_TWO
TOKENS = 12
SIZES = [1, 2, 4, 8, 16]  # of batches that have a graph


@pytest.fixture(scope="module", params=["1", "0"], ids=["v2", "v1"])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """vLLM's choice of the model runner."""
    # The first runner forbids captures to the whole process when it has made its own; the second does not ask for them.
    set_cudagraph_capturing_enabled(True)
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
def stock(runner: str, checkpoint: Path) -> dict[tuple[int, ...], list[int]]:
    """What stock vLLM generates with its graphs, all prompts in one batch."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(str(checkpoint), max_model_len=256, **memory, **deployed("float32"))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return {tuple(one): list(output.outputs[0].token_ids) for one, output in zip(PROMPTS, outputs, strict=True)}


@pytest.fixture(scope="module")
def bench(stock: object, runner: str, checkpoint: Path) -> Iterator[Bench]:
    """An engine with graphs in float32, and the oracle."""
    bench = Bench(checkpoint, checkpoint.name, **deployed("float32"))
    yield bench
    assert bench.engine.interleaver.idle, "a trace left something behind"
    bench.engine.close()
