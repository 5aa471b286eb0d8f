"""A cache of eight-bit numbers is refused where the processor has no kernel for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.distributed import cleanup_dist_env_and_memory

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import LocalEngine


def test_an_engine_with_it_does_not_start(tmp_path: Path) -> None:
    checkpoint = write_demo_model(tmp_path / "llama", "llama", Shape(layers=2, hidden=128, context=256))
    try:
        with pytest.raises(NotImplementedError, match="AVX-512"):
            LocalEngine(checkpoint, dtype="float32", kv_cache_dtype="fp8")
    finally:
        cleanup_dist_env_and_memory()
