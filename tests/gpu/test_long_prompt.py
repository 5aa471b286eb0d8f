"""A prompt of 32,000 tokens of a model of 1B, read and changed on a GPU, is what transformers' eager forward makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Limits, LocalEngine
from tests.engine.long_prompt import check_long_prompt

SHAPE = Shape(layers=16, hidden=2048, heads=32, kv_heads=8, context=32_768)
TOKENS = 32_000


class Wide(Limits):
    """Room for one location of the whole prompt, and for what a block makes of it."""

    step_seconds = 60.0
    block_memory_bytes = 4 << 30
    max_saved_bytes = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", SHAPE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    options = {"max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 6 << 30}
    engine = LocalEngine(checkpoint, Wide, dtype="float32", max_model_len=SHAPE.context, **options)
    yield engine
    assert engine.interleaver.idle
    engine.close()


@pytest.mark.parametrize("changed", [False, True], ids=["read", "changed"])
def test_a_long_prompt(engine: LocalEngine, checkpoint: Path, changed: bool) -> None:
    check_long_prompt(engine, checkpoint, SHAPE, TOKENS, changed, "cuda", relative=1e-3)
