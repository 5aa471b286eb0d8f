"""A model over two ranks: one process answers for both, and gives what the workers' own blocks give, also as plans.

The workers' own blocks read whole weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from interpose.cli.demo_model import write_demo_model
from tests.engine.conftest import Bench
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
from tests.engine.interleave.test_sandboxed_plans import (  # noqa: F401
    test_a_planned_loop_gives_what_the_block_gives_in_the_workers,
    test_two_blocks_beside_each_other_have_plans_of_their_own,
)
from tests.engine.model.test_parameters import (  # noqa: F401
    test_a_name_that_there_is_not,
    test_a_write_is_refused_and_reaches_nobody,
    test_every_weight_is_the_checkpoints,
    test_they_compute_with_the_values_of_the_model,
)
from tests.engine.notebook import notebook
from tests.engine.spread import SpreadEngine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    made = SpreadEngine(checkpoint, 2, 1, step_seconds=60.0, dtype="float32", sandbox=True, plans=True)
    yield made
    assert made.worker.idle, "a rank holds something of a trace"
    made.close()


@pytest.fixture
def bench(engine: LocalEngine, checkpoint: Path) -> Bench:
    """The engine for blocks of a tenant with trust, which run in the workers."""
    engine.trusted = True
    return Bench(checkpoint, "llama", lambda *_, **__: engine)


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
