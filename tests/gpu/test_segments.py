"""Steps in segments of captured graphs give the bits that the same blocks give in eager steps of the same padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm.compilation.monitor import set_cudagraph_capturing_enabled

import executor.plugin.graphs as plugin
from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import LocalEngine, Ran
from tests.engine.interleave.test_loops_in_tables import KEEP, PROMPTS, block, check_same, loop
from tests.engine.interleave.test_segments import BLOCKS, MISSES, STEPS

SIZES = [1, 2, 4, 8, 16, 32, 64]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """An engine with graphs, under vLLM's V2 runner."""
    set_cudagraph_capturing_enabled(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        options = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": SIZES}}
        checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
        made = LocalEngine(checkpoint, graphs=True, dtype=request.param, max_num_seqs=8, **options)
        yield made
        assert made.interleaver.idle, "a trace left something behind"
        made.close()


@contextmanager
def eager() -> Iterator[None]:
    """Run the steps with blocks eager, on the inputs and padding of the graphs."""
    run: Callable[..., bool] = plugin.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "run", lambda _, *rest: run(None, *rest) or True)
        yield


def counts(engine: LocalEngine) -> tuple[int, int, int, int]:
    """Return the steps that began in segments, those that ended eager, failed captures, and wrong chains."""
    found = engine.worker.model_runner.graphs.dispatcher.counts
    return found.steps["in segments of captured graphs"], found.missed, found.failed, found.mismatched


def both(engine: LocalEngine, run: Callable[[], list[Ran]]) -> list[list[Ran]]:
    """Run blocks with graphs, which learn where to break, then eager, then with graphs again."""
    run()
    run()
    with eager():
        first = run()
    return [first, run()]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_what_it_gives_in_eager_steps(engine: LocalEngine, name: str) -> None:
    before = counts(engine)

    def run() -> list[Ran]:
        return engine.run_traces(
            [[block(BLOCKS[name], i, max_tokens=STEPS)] for i in range(2)], plain=(PROMPTS[2],), plain_tokens=STEPS
        )

    rans = both(engine, run)
    for one, other in zip(rans[0][:2], rans[1][:2], strict=True):
        check_same(one, other)
    assert rans[0][2].token_ids == rans[1][2].token_ids
    steps, missed, failed, mismatched = (now - then for now, then in zip(counts(engine), before, strict=True))
    assert (failed, mismatched) == (0, 0)
    assert steps > 0 and missed <= 12 and (missed > 0 or name not in MISSES), (
        engine.worker.model_runner.graphs.dispatcher.counts
    )


def test_blocks_of_all_kinds_that_come_and_go(engine: LocalEngine) -> None:
    texts: list[Any] = [*BLOCKS.values(), loop(KEEP), loop("model.model.layers[0].output[0][:] += vector\n" + KEEP)]

    def run() -> list[Ran]:
        blocks = [block(text, i % 3, max_tokens=9 + (5 * i) % 13) for i, text in enumerate([*texts, *reversed(texts)])]
        return engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],) * 3, plain_tokens=30)

    rans = both(engine, run)
    for i, (one, other) in enumerate(zip(*rans, strict=True)):
        assert (i, one.state) == (i, other.state)
        assert one.token_ids == other.token_ids, i
        if one.state is not None:
            check_same(one, other)
    assert counts(engine)[2:] == (0, 0)
