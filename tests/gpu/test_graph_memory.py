"""Tables and graphs stay within the part of the GPU's memory that the engine was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import LocalEngine
from tests.engine.interleave.test_loops_in_tables import LOOPS, PROMPTS, STEPS, block
from tests.gpu.conftest import deployed

SHARE = 0.2  # of the GPU
AROUND = 700 << 20  # bytes of CUDA's own context and libraries, which vLLM does not count either


def taken() -> int:
    """Bytes of the GPU's memory that all processes have."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_the_engine_keeps_to_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    before, total = taken(), torch.cuda.mem_get_info()[1]
    memory = {"gpu_memory_utilization": SHARE, "kv_cache_memory_bytes": None}
    engine = LocalEngine(write_demo_model(tmp_path / "llama", "llama"), graphs=True, **memory, **deployed("bfloat16"))  # type: ignore[arg-type]
    try:
        for text, _ in LOOPS.values():
            engine.run_traces([[block(text, i)] for i in range(3)], plain=(PROMPTS[2],), plain_tokens=STEPS)
        counts = engine.worker.model_runner.graphs.dispatcher.counts
        assert counts.captured > 5
        grown = taken() - before
        print(f"{grown / total:.3f} of the GPU after {counts.captured} captures, with {SHARE} given")
        assert SHARE * total * 0.8 < grown < SHARE * total + AROUND
    finally:
        engine.close()
