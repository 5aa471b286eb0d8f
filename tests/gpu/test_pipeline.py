"""Two pipeline stages on two GPUs, as they are deployed: traced steps run eager through both, the others replay graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interpose.cli.demo_model import write_demo_model
from tests.engine.conftest import Bench
from tests.engine.fidelity.test_fidelity import (  # noqa: F401
    PROMPTS,
    test_a_value_from_another_invoke_patches_this_one,
    test_an_edit_does_what_the_same_edit_does_in_transformers,
    test_eight_at_once_each_gets_its_own,
    test_every_location_in_prefill_and_decode,
    test_forced_samples_are_what_the_model_goes_on_with,
)
from tests.engine.harness import Block
from tests.engine.interleave.test_stopping import test_a_block_ends_its_request_at_once_whatever_the_sampling_says  # noqa: F401
from tests.engine.model.test_apply import test_a_logit_lens_in_every_layer_and_step  # noqa: F401
from tests.engine.model.test_not_finite import test_a_request_that_spoils_its_cache_fails_and_harms_nobody  # noqa: F401
from tests.engine.parallel.test_pipeline import (  # noqa: F401
    test_a_block_that_differs_between_the_ranks_fails_alone,
    test_random_numbers_of_torch_are_the_same_on_every_rank,
)
from tests.engine.spread import SpreadEngine
from tests.gpu.conftest import TOKENS, deployed


@pytest.fixture(scope="module")
def bench(runner: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    bench = Bench(checkpoint, "llama", SpreadEngine, tensor=1, pipeline=2, **deployed("float32"))
    yield bench
    assert bench.engine.interleaver.idle, "a trace left something behind"
    bench.engine.close()


def test_plain_requests_beside_traces_give_the_tokens_of_the_model(bench: Bench) -> None:
    """In steps that replay graphs, and in those that a trace makes eager."""
    source = "first = model.model.layers[0].mlp.output.save()\nlast = model.model.layers[3].mlp.output.save()"
    expected = [bench.oracle.run(prompt, TOKENS).tokens for prompt in PROMPTS]
    alone = bench.engine.run_traces([], plain=tuple(PROMPTS), plain_tokens=TOKENS)
    traces = [[Block(prompt, source, {"max_tokens": 3, "ignore_eos": True})] for prompt in PROMPTS]
    beside = bench.engine.run_traces(traces, plain=tuple(PROMPTS), plain_tokens=TOKENS)[len(traces) :]
    assert [ran.token_ids for ran in alone] == [ran.token_ids for ran in beside] == expected
