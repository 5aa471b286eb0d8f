"""Blocks of the prompt's step alone run in the tables, and give what their greenlets give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from tests.engine.harness import Block, LocalEngine, Ran, watch
from tests.engine.interleave.test_loops_in_tables import (
    HIDDEN,
    KEEP,
    LOOPS,
    PROMPTS,
    STEPS,
    account,
    block,
    check_same,
    in_tables,
    loop,
)

# A block of the prompt's step, and whether the tables take it.
BLOCKS = {
    "keeps one layer": ("kept = [model.model.layers[1].output[0].save()]", True),
    "keeps it under a name": ("h = model.model.layers[1].output[0].save()", True),
    "keeps every layer": ("kept = [layer.output[0].save() for layer in model.model.layers]", True),
    "keeps a layer and a view of it": ("h = model.blocks[0].resid_post.save()\nlast = h[-1].save()", True),
    "keeps it twice": ("h = model.model.layers[1].output[0]\na = h.save()\nb = h.save()\nboth = [a, b, h]", True),
    "steers": ("model.model.layers[0].output[0][:] += vector\nkept = model.model.layers[1].output[0].save()", True),
    "steers and keeps nothing": ("model.blocks[0].resid_post[:] += vector", True),
    "scales, and keeps before and after": (
        "x = model.model.layers[1].mlp.output\na = x.clone().save()\nx *= 0.5\nb = x.save()",
        True,
    ),
    "assigns": ("model.model.layers[0].mlp.output = model.model.layers[0].mlp.output * 0.5", True),
    "keeps the result too": ("kept = [model.model.layers[1].output[0].save()]\nresult = tracer.result.save()", True),
    "works on after the result": (
        "h = model.model.layers[1].output[0].save()\nresult = tracer.result\n"
        "both = [h.sum(0), len(result.token_ids), h].save()\nprint('over', h.shape)",
        True,
    ),
    "fails after the result": ("h = model.model.layers[1].output[0].save()\ntracer.result\nh.reshape(3, 5, 7)", True),
    "asks for a layer after the result": (
        "h = model.model.layers[0].output[0].save()\ntracer.result\nmodel.model.layers[1].output",
        True,
    ),
    "adds to a list and a dict": (
        "kept, by_layer = [].save(), {}.save()\nfor i in range(2):\n    h = model.model.layers[i].output[0]\n"
        "    kept.append(h[:2])\n    by_layer[i] = h.save()",
        True,
    ),
    "keeps text and numbers": (
        "h = model.model.layers[0].output[0].save()\nsaid = ['len', len(h), h.shape[1]].save()",
        True,
    ),
    "a probe": ("kept = torch.relu(model.model.layers[0].output[0] @ vector[:, None]).save()", False),
    "keeps a column": ("kept = model.model.layers[0].output[0][:, 5].save()", True),
    "steers the last row": ("model.model.layers[0].output[0][-1] += vector", True),
    "patches rows": (
        "h = model.blocks[0].resid_post\nh[1] = vector\nh[[0, 2]] *= 0\nh[-2:, 3:9] = vector[:6]\n"
        "both = [h[-1].save(), h.save()]",
        True,
    ),
    "a vector for each row": ("h = model.model.layers[1].mlp.output\nh[:2] += torch.outer(vector[:2], vector)", True),
    "sets a column": ("model.model.layers[0].output[0][:, 3:9] = 0.5", True),
    "prints": ("h = model.model.layers[0].output[0].save()\nprint(h.shape)", False),
    "decides on a value": ("h = model.model.layers[0].output[0]\nif h.sum() > 0:\n    h *= 2\nkept = h.save()", False),
    "keeps the logits": ("kept = [model.model.layers[0].output[0].save(), model.logits.output.save()]", False),
    "fails": ("h = model.model.layers[0].output[0].save()\nh.reshape(3, 5, 7)", False),
    "asks for an earlier layer": ("model.model.layers[1].output\nmodel.model.layers[0].output", False),
    "asks for nothing": ("kept = vector.save()", False),
    "waits for a later step": (
        "a = model.model.layers[0].output[0].save()\nb = model.model.layers[0].next().output[0].save()",
        False,
    ),
    "stops": ("h = model.model.layers[0].output[0].save()\ntracer.stop()", False),
}


def compare(one: Ran, other: Ran, same_bits: bool = True) -> None:
    """Compare what two runs of a block gave, which may have failed.

    Args:
        one, other: the runs.
        same_bits: whether values are equal bit for bit, and not within rounding.
    """
    for ran in (one, other):
        if ran.failure is not None:
            ran.failure.trace_id = ""
    assert (one.state, one.failure, one.logs) == (other.state, other.failure, other.logs)
    if one.state is Ended.DONE and same_bits:
        check_same(one, other)
    elif one.state is Ended.DONE:
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(one.saved, other.saved, rtol=1e-6, atol=1e-6)


def in_both(engines: tuple[LocalEngine, LocalEngine], *blocks: Block, same_bits: bool = True) -> list[tuple[Ran, Ran]]:
    """Return what blocks give in both engines, each in a trace of its own, beside a plain request."""
    rans = [engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],), plain_tokens=STEPS) for engine in engines]
    assert rans[0][-1].token_ids == rans[1][-1].token_ids
    pairs = list(zip(rans[0][:-1], rans[1][:-1], strict=True))
    for one, other in pairs:
        compare(one, other, same_bits)
    return pairs


@pytest.mark.parametrize("tokens", [1, STEPS])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_what_its_greenlet_gives(
    engines: tuple[LocalEngine, LocalEngine], name: str, tokens: int
) -> None:
    text, taken = BLOCKS[name]
    before = in_tables(engines[1])
    pairs = in_both(engines, *(block(text, i, max_tokens=tokens) for i in range(2)))
    assert in_tables(engines[1]) - before == 2 * taken, engines[1].interleaver.loops.refused
    for one, other in pairs:
        assert account(one).steps == account(other).steps
        assert (account(other).tiers == {"graph": 1}) == taken


def test_blocks_of_all_kinds_start_in_one_step(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """They are of the prompt alone, loops, and blocks that run as they are; more than the batch has seats."""
    texts = [text for text, _ in (*BLOCKS.values(), *list(LOOPS.values())[:6])]
    in_both(engines, *(block(text, i % 3, max_tokens=1 + i % 5) for i, text in enumerate(texts)))


@pytest.mark.parametrize("tokens", [1, STEPS])
def test_a_prompt_of_one_token(engines: tuple[LocalEngine, LocalEngine], tokens: int) -> None:
    before = in_tables(engines[1])
    texts = [BLOCKS[name][0] for name in ("keeps every layer", "steers", "works on after the result", "a probe")]
    blocks = [replace(block(text, 0, max_tokens=tokens), prompt=[7]) for text in texts]
    in_both(engines, *blocks[:-1])
    in_both(engines, blocks[-1], same_bits=False)  # some processors multiply one row by another kernel than several
    assert in_tables(engines[1]) - before == len(texts)  # a program has one row there


def test_invokes_of_a_trace(engines: tuple[LocalEngine, LocalEngine]) -> None:
    shared = {"vector": torch.linspace(-1, 1, HIDDEN)}
    before = in_tables(engines[1])
    texts = [BLOCKS[name][0] for name in ("steers", "keeps the result too", "keeps a layer and a view of it")]
    rans = [engine.run(*(replace(block(one, i), captured=shared) for i, one in enumerate(texts))) for engine in engines]
    for one, other in zip(*rans, strict=True):
        check_same(one, other)
    assert in_tables(engines[1]) - before == len(texts)


def test_numbers_that_are_not_finite_fail_the_block_alone(engines: tuple[LocalEngine, LocalEngine]) -> None:
    text = "model.model.layers[0].output[0][:] *= 1e39\nkept = model.model.layers[1].output[0].save()"
    for tokens in (1, STEPS):
        plain = engines[1].plain(PROMPTS[2], max_tokens=STEPS).token_ids
        ran, beside = engines[1].run_traces(
            [[block(text, 0, max_tokens=tokens)]], plain=(PROMPTS[2],), plain_tokens=STEPS
        )
        assert ran.state is Ended.FAILED and ran.failure is not None and "finite" in ran.failure.message
        assert not ran.saved and beside.token_ids == plain


def test_blocks_that_leave_the_tables_in_one_step_are_told_apart(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """Of the requests whose prompts change in one step, those alone fail that leave numbers that are not finite."""
    spoils = "model.model.layers[0].output[0][:] *= 1e39"
    texts = [BLOCKS["steers"][0], spoils, BLOCKS["keeps one layer"][0], spoils, BLOCKS["assigns"][0]]
    rans = [engine.run_traces([[block(text, i % 3)] for i, text in enumerate(texts)]) for engine in engines]
    for one, other in zip(*rans, strict=True):
        assert one.state is other.state
        if one.state is Ended.DONE:
            check_same(one, other)
    assert [ran.state for ran in rans[1]].count(Ended.FAILED) == 2


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_that_is_given_up_leaves_nothing(engines: tuple[LocalEngine, LocalEngine], steps: int) -> None:
    engine = engines[1]
    for name in ("keeps one layer", "steers", "works on after the result"):
        engine.give_up(block(BLOCKS[name][0], 0), steps)
        assert engine.interleaver.idle and not engine.interleaver.loops


def test_a_request_whose_block_only_read_is_a_plain_request(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """The scheduler hears of it with the prompt's step."""
    seen = []
    for engine in engines:
        scheduler = engine.scheduler
        update = scheduler.update_from_output

        def watched(*args: Any, of: Any = scheduler, do: Any = update) -> Any:
            outputs = do(*args)
            seen.append(len(of._traced))
            return outputs

        with pytest.MonkeyPatch.context() as patch:
            watch(patch, scheduler, "update_from_output", watched)
            for name in ("keeps one layer", "steers"):
                engine.run(block(BLOCKS[name][0], 0, max_tokens=4))
    assert seen[:8] == seen[8:] == [0, 0, 0, 0, 1, 1, 1, 0]


def test_prompts_from_the_cache(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """The steps after the prompt run in the tables all the same."""
    ids = [5 + 37 * i % 480 for i in range(150)]
    texts = [
        loop("model.blocks[0].resid_post[:] += vector\n" + KEEP, "tracer.iter[1:]"),
        loop("kept.append(model.logits.output.save())"),
        "kept = model.logits.output.save()",
    ]
    for cached in (0, 128):
        blocks = [replace(block(text, i), prompt=[i + 1, *ids]) for i, text in enumerate(texts)]
        pairs = in_both(engines, *blocks)
        assert [[ran.cached for ran in pair] for pair in pairs] == [[cached] * 2] * 3
        assert account(pairs[0][1]).tiers == {"graph": STEPS - 1, "idle": 1}
        assert account(pairs[0][1]).cached_tokens == cached
    last = {
        "keeps": loop("kept.append(model.blocks[1].resid_post[-1].save())"),
        "steers": loop("model.blocks[0].resid_post[-1] += vector\nkept.append(model.blocks[1].resid_post[-1].save())"),
        "once": "kept = [model.blocks[i].resid_post[-1].save() for i in range(2)]",
        "two": "model.blocks[0].resid_post[-2:] += vector\nkept = model.blocks[1].resid_post[-2:].save()",
        "from the start": "kept = model.blocks[1].resid_post[140].save()",
    }
    for cached in (0, 128, 128):
        blocks = [replace(block(text, 0), prompt=[i + 9, *ids]) for i, text in enumerate(last.values())]
        pairs = in_both(engines, *blocks)
        assert [[ran.cached for ran in pair] for pair in pairs] == [[cached] * 2] * len(last)
        tiers = {name: account(pair[1]).tiers for name, pair in zip(last, pairs, strict=True)}
        assert tiers.pop("from the start") == {"block" if cached else "graph": 1}
        assert all(set(found) == {"graph"} for found in tiers.values()), tiers
    wrong = [replace(block(loop(KEEP), 0), prompt=prompt, prefix=True) for prompt in (ids, ids, PROMPTS[0])]
    for one, other in in_both(engines, *wrong):
        assert one.failure is not None and "may have come from the prefix cache" in one.failure.message, other
