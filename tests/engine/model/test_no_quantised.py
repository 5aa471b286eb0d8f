"""Quantised weights do not load where the engine has no kernel for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.distributed import cleanup_dist_env_and_memory

from tests.engine.quantised import Quantised


def test_an_engine_with_them_does_not_start(tmp_path: Path) -> None:
    try:
        with pytest.raises(AttributeError, match="cpu_gemm_wna16"):
            Quantised(tmp_path, "gptq")
    finally:
        cleanup_dist_env_and_memory()
