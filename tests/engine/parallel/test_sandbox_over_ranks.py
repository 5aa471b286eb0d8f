"""A model over two ranks: one process answers for both, and gives what the workers' own blocks give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.engine.interleave.test_sandbox import (
    ONE,
    a_cache,
    a_patch_from_prompt_to_prompt,
    an_invoke_without_a_prompt,
    invokes_that_share_a_list,
    same,
    several_errors,
)
from tests.engine.notebook import notebook
from tests.engine.spread import SpreadEngine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    made = SpreadEngine(checkpoint, 2, 1, step_seconds=60.0, dtype="float32", sandbox=True)
    yield made
    assert made.worker.idle, "a rank holds something of a trace"
    made.close()


TRACES = [
    invokes_that_share_a_list,
    a_patch_from_prompt_to_prompt,
    an_invoke_without_a_prompt,
    a_cache,
    several_errors,
]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
def test_a_trace_gives_what_it_gives_in_the_workers(engine: LocalEngine, trace: Callable[[Any], list[Any]]) -> None:
    made = []
    for trusted in (True, False):
        engine.trusted = trusted
        made.append(trace(notebook(engine)))
    assert same(*made), made


def test_ranks_cannot_differ(engine: LocalEngine) -> None:
    """What would differ from rank to rank in the workers is the same on both, because it happens once."""
    engine.trusted = False
    source = (
        "import time\nh = model.model.layers[0].mlp.output\nh[:] += time.time_ns() % 1000 / 1000\n"
        "model.model.layers[1].mlp(h)\nlogits = model.logits.output.save()\n"
    )
    [ran] = engine.run(Block(ONE, source, {"max_tokens": 2}))
    assert ran.failure is None and "logits" in ran.saved


def test_a_process_that_is_lost_fails_its_trace_on_all_ranks(engine: LocalEngine) -> None:
    engine.trusted = False
    source = "import os\nmodel.model.layers[0].output\nos._exit(1)\n"
    [ran, plain] = engine.run(Block(ONE, source), plain=(ONE,))
    assert ran.failure is not None and "was ended" in ran.failure.message
    assert len(plain.token_ids) == 4
