"""Prompts of up to 32,000 tokens, of which a step has 8,192, are what transformers' eager forward makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import LocalEngine
from tests.engine.long_prompt import check_long_prompt

SHAPE = Shape(layers=2, hidden=64, context=32_768)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", SHAPE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(checkpoint, dtype="float32", max_model_len=SHAPE.context, max_num_batched_tokens=8192)
    yield engine
    assert engine.interleaver.idle
    engine.close()


@pytest.mark.parametrize(("tokens", "changed"), [(32_000, False), (12_000, True)], ids=["read", "changed"])
def test_a_long_prompt(engine: LocalEngine, checkpoint: Path, tokens: int, changed: bool) -> None:
    check_long_prompt(engine, checkpoint, SHAPE, tokens, changed)
