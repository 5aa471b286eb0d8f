"""Prompts longer than a step over two tensor-parallel ranks: the tests of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from interpose.cli.demo_model import write_demo_model
from tests.engine.interleave.test_chunks import (  # noqa: F401
    SHAPE,
    STEP,
    oracle,
    test_a_block_reads_the_whole_prompt_and_each_later_step,
    test_a_change_of_each_row_by_itself,
    test_a_request_that_is_evicted_in_the_middle,
    test_several_at_a_time_beside_short_and_plain_requests,
    test_what_needs_other_rows_is_refused_before_the_request_starts,
)
from tests.engine.interleave.test_last_rows import (  # noqa: F401
    SIZE,
    test_a_lens_over_layers,
    test_steering_in_each_step,
    test_the_last_row_of_a_prompt_from_the_cache,
)
from tests.engine.spread import SpreadEngine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", SHAPE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[SpreadEngine]:
    engine = SpreadEngine(
        checkpoint, 2, 1, dtype="float32", max_model_len=512, max_num_batched_tokens=STEP, block_size=SIZE
    )
    yield engine
    assert engine.worker.idle, "a trace left something behind"
    engine.close()
