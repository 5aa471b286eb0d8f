"""Over two tensor-parallel ranks, loops that run in the tables give what the blocks themselves give there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor.core.ended import Ended
from interpose.cli.demo_model import write_demo_model
from tests.engine.block.test_accounting import account
from tests.engine.harness import Ran
from tests.engine.interleave.test_loops_in_tables import KEEP, LOOPS, PROMPTS, STEPS, block, check_same, loop
from tests.engine.spread import SpreadEngine

CASES = {
    **LOOPS,
    "a head's part of a product": (loop("kept.append(model.blocks[1].attn.z[:, 1].save())"), 0),
    "columns of which a rank holds a part": (loop("model.model.layers[0].mlp.down_proj.input[:] *= 0.5\n" + KEEP), 0),
    "a program with columns of which a rank holds a part": (
        loop("x = model.model.layers[0].mlp.down_proj.input\nkept.append(torch.tanh(x).topk(3)[1])"),
        0,
    ),
}
# Loops that go into the tables before the prompt's step on one rank, and after it on several; beside those of all steps.
BEFORE_THE_PROMPT = {"the first steps", "the prompt's step and one more", "is no plan after the prompt"}
# A rank holds a part of the heads. After a plan that is for some steps only, a loop comes back for a step.
OTHER_STEPS = {"ablates a head": 0, "a part with an end": 7}


def steps_in_tables(name: str) -> int:
    """Return how many steps of a case run in the tables where there are several ranks."""
    steps = OTHER_STEPS.get(name, CASES[name][1])
    return steps - (steps == STEPS or name in BEFORE_THE_PROMPT)


def run_all(engine: SpreadEngine) -> dict[str, list[Ran]]:
    """Run each case for two requests at a time, beside a plain one, and then all at once with fewer places than requests."""
    rans = {
        name: engine.run_traces([[block(text, 0)], [block(text, 1)]], plain=(PROMPTS[2],), plain_tokens=STEPS)
        for name, (text, _) in CASES.items()
    }
    texts = [text for text, _ in CASES.values() if "torch.stack" not in text]
    blocks = [block(text, i % 3, max_tokens=2 + (5 * i) % 13) for i, text in enumerate([*texts, *reversed(texts)])]
    rans["all"] = engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],) * 3, plain_tokens=30)
    rans["not finite"] = engine.run_traces([[block(loop("model.model.layers[0].output[0][:] *= 1e39"), 0)]])
    return rans


@pytest.fixture(scope="module")
def rans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What an engine gives without tables, and what an engine gives with them."""
    checkpoint: Path = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    found = []
    for graphs in (False, True):
        engine = SpreadEngine(checkpoint, 2, 1, step_seconds=60.0, dtype="float32", max_num_seqs=8, graphs=graphs)
        found.append(run_all(engine))
        assert engine.worker.idle, "a trace left something behind"
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize("name", CASES)
def test_a_loop_gives_what_its_block_gives(rans: tuple[Any, Any], name: str) -> None:
    blocks, loops = (given[name] for given in rans)
    for one, other in zip(blocks[:2], loops[:2], strict=True):
        check_same(one, other)
    assert blocks[2].token_ids == loops[2].token_ids
    steps = steps_in_tables(name)
    for ran in loops[:2]:
        told = account(ran)
        assert told.tiers.get("graph", 0) == steps and sum(told.tiers.values()) == told.steps, told.reasons


def test_requests_that_come_and_go_get_what_their_blocks_give(rans: tuple[Any, Any]) -> None:
    for i, (one, other) in enumerate(zip(*(given["all"] for given in rans), strict=True)):
        assert (i, one.token_ids) == (i, other.token_ids)
        if one.state is not None:
            check_same(one, other)


def test_numbers_that_are_not_finite_on_a_rank_fail_their_request(rans: tuple[Any, Any]) -> None:
    for given in rans:
        [ran] = given["not finite"]
        assert ran.state is Ended.FAILED and ran.failure is not None and "finite" in ran.failure.message, ran.failure
