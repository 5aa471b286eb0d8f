"""What a block made of the attention's keys and values never reaches the requests that get its cache blocks afterwards."""

from __future__ import annotations

import pytest

from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block, check_failed
from tests.oracle import difference

LONG = [7 * i % 499 for i in range(200)]
LATER = ([5, 400, 17, 99, 256, 31, 8], [222], LONG[:40])
SAMPLING = {"max_tokens": 3, "ignore_eos": True}
TOLERANCE = 1e-4


def first_layer(bench: Bench) -> str:
    """How a block names it."""
    return "model.transformer.h[0]" if bench.arch == "gpt2" else "model.model.layers[0]"


def check_untouched(bench: Bench) -> None:
    """Plain and traced requests, alone and beside a block that writes NaN, give what they always give."""
    layer = first_layer(bench)
    spoils = Block(LONG, f"{layer}.mlp.output[:] = float('nan')", SAMPLING)
    for prompt in LATER:
        truth = bench.oracle.run(prompt, 3)
        assert list(bench.engine.plain(prompt, **SAMPLING).token_ids) == truth.tokens
        reads = Block(prompt, "logits = model.logits.output.save()", SAMPLING)
        spoilt, read, plain = bench.engine.run_traces([[spoils], [reads]], plain=(prompt,), plain_tokens=3)
        check_failed(spoilt, pb.ERROR_CODE_INTERVENTION, "torch.nan_to_num", None)
        assert read.failure is None
        assert read.token_ids == plain.token_ids == truth.tokens
        assert difference(read.saved["logits"], truth.logits[0]) < TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        "{layer}.mlp.output[:] = float('nan')",
        "{layer}.mlp.output[0, 3] = float('inf')",
        "{layer}.mlp.output.data[:] = float('nan')",
        "model.blocks[0].attn.v[:] = 1e30",
        "for _ in tracer.iter[1:]:\n    {layer}.mlp.output[:] = float('nan')",
    ],
)
def test_a_request_that_spoils_its_cache_fails_and_harms_nobody(bench: Bench, change: str) -> None:
    layer = first_layer(bench)
    [spoilt] = bench.engine.run(Block(LONG, change.format(layer=layer), SAMPLING))
    check_failed(spoilt, pb.ERROR_CODE_INTERVENTION, "torch.nan_to_num", None)
    check_untouched(bench)


def test_a_block_that_sees_every_prompt_is_held_to_it_too(bench: Bench) -> None:
    layer = first_layer(bench)
    everywhere = Block([], f"{layer}.mlp.output[:] = float('nan')", joint=True)
    prompt = Block(LONG, "x = model.logits.output.save()", SAMPLING, gang=1)
    for ran in bench.engine.run(prompt, everywhere):
        check_failed(ran, pb.ERROR_CODE_INTERVENTION, "torch.nan_to_num", None)
    check_untouched(bench)


def test_what_the_block_itself_ran_into_is_what_it_says(bench: Bench) -> None:
    source = f"{first_layer(bench)}.mlp.output[:] = float('nan')\nmodel.logits.output\nraise ValueError('mine')"
    [ran] = bench.engine.run(Block(LONG, source, SAMPLING))
    assert ran.failure is not None
    assert (ran.failure.exception_type, ran.failure.exception_message) == ("ValueError", "mine")
    check_untouched(bench)


def test_logits_may_be_anything(bench: Bench) -> None:
    """They are in no cache: forbidding tokens is what infinities are for."""
    [ran] = bench.engine.run(Block([5, 6], "model.logits.output[:, 1:] = -float('inf')", {"max_tokens": 1}))
    assert ran.failure is None
    assert ran.token_ids == [0]
