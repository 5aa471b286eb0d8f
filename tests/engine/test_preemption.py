"""A traced request that the engine evicts and computes anew is never silently wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import Block, LocalEngine
from tests.oracle import Edit, Oracle, difference

PROMPTS = [[5 + 7 * i, 400, 17, 99 + i, 256, 31, 8] for i in range(4)]
TOKENS = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    """An engine whose cache holds two of the four requests to their ends."""
    engine = LocalEngine(checkpoint, dtype="float32", block_size=32, num_gpu_blocks_override=10, max_num_seqs=4)
    yield engine
    assert engine.interleaver.idle
    engine.close()


def test_an_evicted_edit_fails_and_the_others_are_right(engine: LocalEngine, checkpoint: Path) -> None:
    """Each edit of the prompt shapes all tokens after it; recomputed without it they would be wrong."""
    source = "model.model.layers[1].mlp.output[:] = 0\nlogits = model.logits.output.save()"
    blocks = [[Block(prompt, source, {"max_tokens": TOKENS, "ignore_eos": True})] for prompt in PROMPTS]
    rans = engine.run_traces(blocks)
    oracle = Oracle(checkpoint)
    evicted = 0
    for prompt, ran in zip(PROMPTS, rans, strict=True):
        if ran.failure is not None:
            assert ran.failure.code == pb.ERROR_CODE_UNAVAILABLE
            assert "evicted" in ran.failure.message
            evicted += 1
            continue
        edit = Edit("model.layers.1.mlp", "output", lambda value: value * 0, steps={0})
        truth = oracle.run(prompt, TOKENS, [edit])
        assert ran.token_ids == truth.tokens
        assert difference(ran.saved["logits"], truth.logits[0]) <= 1e-4
    assert 0 < evicted < len(PROMPTS), "the cache should have been too small for some"


def test_an_evicted_reader_that_has_ended_goes_on(engine: LocalEngine, checkpoint: Path) -> None:
    source = "logits = model.logits.output.save()"
    blocks = [[Block(prompt, source, {"max_tokens": TOKENS, "ignore_eos": True})] for prompt in PROMPTS]
    oracle = Oracle(checkpoint)
    for prompt, ran in zip(PROMPTS, engine.run_traces(blocks), strict=True):
        assert ran.failure is None
        assert ran.token_ids == oracle.run(prompt, TOKENS).tokens
