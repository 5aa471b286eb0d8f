"""The same blocks of the tiny model in the worker and in a sandbox, beside other requests: equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import EVERY_STEP, Block, LocalEngine, Ran, check_failed

BLOCKS = {
    "saved": "h = model.model.layers[1].output[0].save()",
    "steered": "model.model.layers[0].output[0][:] *= 3\nlogits = model.logits.output.save()",
    "assigned": (
        "o = model.model.layers[1].mlp.output\nmodel.model.layers[1].mlp.output = o * 2 + 1\nlogits = model.logits.output.save()"
    ),
    "every step": EVERY_STEP,
    "a list": "kept = []\nfor step in tracer.iter[:]:\n    kept.append(model.model.layers[1].output[0].save())",
    "a module applied": "h = model.model.layers[1].output[0]\nx = model.model.layers[0].mlp(h).save()",
    "a lens": "h = model.blocks[1].resid_post\nx = model.unembed(model.final_norm(h)).save()",
    "a module applied wrongly": "h = model.model.layers[1].output[0]\nx = model.model.layers[0].mlp(h[:, :3]).save()",
    "a weight": "w = model.model.layers[0].mlp.down_proj.weight.save()",
    "a canonical value": (
        "model.blocks[1].resid_post[:] += 1\nx = model.blocks[1].resid_post.save()\nlogits = model.logits.output.save()"
    ),
    "a pattern": "p = model.blocks[0].attn.pattern.save()",
    "a token replaced": "model.samples.output[:] = 7",
    "a token that is none": "model.samples.output[:] = 10**7",
    "a skip": "model.model.layers[1].mlp.skip(model.model.layers[1].mlp.input * 0)\nlogits = model.logits.output.save()",
    "a stop": (
        "for step in tracer.iter[:]:\n    h = model.model.layers[0].output[0].save()\n    if step == 1:\n        tracer.stop()"
    ),
    "an error": "x = model.model.layers[0].output[0]\ny = x.nothing",
    "a misfit": "h = model.model.layers[0].mlp.output\nh.resize_(1, 2)\nmodel.logits.output",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    made = LocalEngine(checkpoint, sandbox=True, dtype="float32")
    yield made
    assert made.interleaver.idle, "a trace left something behind"
    made.close()


def same(one: Any, other: Any) -> bool:
    """Return whether two saved values are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(one == other) or repr(one) == repr(other)


def both(engine: LocalEngine, source: str) -> tuple[list[Ran], list[Ran]]:
    """Run a block in the worker and in a sandbox, with another request beside it each time."""
    ran = []
    for trusted in (True, False):
        engine.trusted = trusted
        block = Block([1, 2, 3, 4, 5], source + "\n", sampling={"max_tokens": 3})
        ran.append(engine.run(block, plain=([4, 5, 6],)))
    return ran[0], ran[1]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_in_a_sandbox_what_it_gives_in_the_worker(engine: LocalEngine, name: str) -> None:
    (here, beside), (there, beside_it) = both(engine, BLOCKS[name])
    assert same(here.saved, there.saved)
    assert (here.token_ids, here.state, here.logs) == (there.token_ids, there.state, there.logs)
    assert beside.token_ids == beside_it.token_ids
    assert (here.failure is None) == (there.failure is None), (here.failure, there.failure)
    if here.failure is not None and there.failure is not None:
        assert (here.failure.code, here.failure.message) == (there.failure.code, there.failure.message)
        assert list(here.failure.frames) == list(there.failure.frames)
    assert there.accounting is not None and {tier.tier for tier in there.accounting.tiers} == {"block"}


def test_a_trace_that_a_sandbox_cannot_run_is_refused_with_the_reason(engine: LocalEngine) -> None:
    engine.trusted = False
    for ran in engine.run(Block([1, 2], "x = 1\n"), Block([3, 4], "y = 2\n")):
        check_failed(ran, pb.ERROR_CODE_INVALID_ARGUMENT, "there is no support yet for several invokes", None)


def test_a_trace_that_is_given_up_ends_its_process(engine: LocalEngine) -> None:
    engine.trusted = False
    engine.give_up(Block([1, 2, 3], "for step in tracer.iter[:]:\n    model.model.layers[0].output\n"), steps=3)
    assert engine.interleaver.idle
