"""Loops that run in the tables give what the blocks themselves give, beside other requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from interpose.contract.cache import Cache
from tests.engine.block.test_accounting import account
from tests.engine.harness import Block, LocalEngine, Ran

PROMPTS = [[5, 400, 17, 99, 256], [7, 8, 9], [300, 20, 1, 44]]
STEPS = 9
HIDDEN = 128
KEEP = "kept.append(model.model.layers[1].output[0].save())"


def loop(body: str, over: str = "tracer.iter[:]", before: str = "", after: str = "") -> str:
    """Return a block with a list `kept` and a loop over steps."""
    lines = ["import torch", "kept = [].save()", *before.splitlines(), f"for step in {over}:"]
    return "\n".join([*lines, *(f"    {line}" for line in body.splitlines()), *after.splitlines()]) + "\n"


# A block, and how many of its steps run in the tables; the request has 9 steps.
LOOPS = {
    "reads one layer": (loop(KEEP), 9),
    "touches the logits": (loop(KEEP + "\nmodel.logits.output"), 8),
    "reads every layer": (loop("for layer in model.model.layers:\n    kept.append(layer.output[0].save())"), 9),
    "reads the stream": (loop("kept.append(model.blocks[1].resid_post.save())"), 9),
    "adds a vector": (loop("model.model.layers[1].output[0][:] += vector\n" + KEEP), 9),
    "adds to the stream": (loop("model.blocks[0].resid_post[:] += vector"), 9),
    "sets some columns": (loop("model.model.layers[0].output[0][:, 3:9] = 0.5\n" + KEEP), 9),
    "scales before and after": (
        loop("x = model.model.layers[1].mlp.output\nkept.append(x.clone())\nx *= 0.5\nkept.append(x.clone())"),
        9,
    ),
    "begins later": (loop(KEEP, "tracer.iter[3:]"), 6),
    "ends early": (loop(KEEP, "tracer.iter[1:5]"), 3),
    "ends early with a print after": (loop(KEEP, "tracer.iter[1:5]", after="print(len(kept))"), 3),
    "two loops": (loop(KEEP, "tracer.iter[1:4]", after=f"for step in tracer.iter[5:8]:\n    {KEEP}"), 4),
    "uses what it kept": (loop(KEEP, after="total = torch.stack(kept[1:]).sum(0).save()"), 9),
    "keeps the step": (loop("kept.append((step, model.model.layers[1].output[0].save()))"), 9),
    "leaves names": (loop("x = model.model.layers[1].output[0].save()", after="last = [step, x].save()"), 9),
    "a part with an end": (
        loop("if step < 4:\n    model.model.layers[0].output[0][:] += vector\n" + KEEP, "tracer.iter[1:]"),
        8,
    ),
    "keeps values on the host": (loop("kept.append(model.model.layers[1].output[0].detach().cpu())"), 9),
    "keeps some columns, wider": (loop("kept.append(model.blocks[1].resid_post[:, [3, 77]].double())"), 9),
    "keeps a difference": (loop("kept.append(model.model.layers[1].mlp.output - vector)"), 9),
    "sums over the steps": (
        loop("total = total + model.blocks[1].resid_post[-1]", before="total = torch.zeros(128)", after="total.save()"),
        9,
    ),
    "assigns an output": (
        loop("x = model.model.layers[0].mlp.output\nmodel.model.layers[0].mlp.output = x * 0.5\n" + KEEP),
        9,
    ),
    "assigns an input": (
        loop("model.model.layers[1].mlp.input = model.model.layers[1].mlp.input + vector\n" + KEEP),
        9,
    ),
    "ablates a head": (loop("model.blocks[1].attn.z[:, 1] = 0\n" + KEEP), 9),
    "makes a tensor": (loop("model.model.layers[1].output[0][:] += torch.full((128,), 0.5)\n" + KEEP), 9),
    "an autoencoder": (
        loop(
            "h = model.model.layers[1].output[0]\na = torch.relu(h * vector)\nkept.append(a.topk(3)[1])\nh[:] += a * 0.1",
            before="import torch",
        ),
        9,
    ),
    "a choice for each row": (
        loop("h = model.model.layers[1].output[0]\nh[:] = torch.where(h[:, :1] > 0, h * vector, h.abs())\n" + KEEP),
        9,
    ),
    "computes the last row": (
        loop(
            "h = model.model.layers[1].output[0]\nh[-1] = torch.where(h[-1] > 0, h[-1] * vector, 0)\n"
            "kept.append(h[-1].save())"
        ),
        9,
    ),
    "keeps what it computes of the first rows": (
        loop("x = model.model.layers[1].mlp.output.abs()\nkept.append((x[:2].sqrt(), x[0].argmax()))"),
        9,
    ),
    "two layers computed": (
        loop(
            "h = model.model.layers[0].output[0]\na = h.abs()\nx = model.model.layers[1].mlp.output\n"
            "x[:] = torch.where(a > 1, x, a * vector)\nkept.append((a - x).save())"
        ),
        9,
    ),
    "mixes rows": (loop("x = model.model.layers[1].mlp.output\nx[:] = torch.where(x[-1] > 0, x, x.abs())\n" + KEEP), 8),
    "carries a sum": (
        loop(
            "total = total + model.model.layers[1].output[0].square()",
            before="import torch\ntotal = torch.zeros(1, 128)",
            after="total.save()",
        ),
        8,
    ),
    "keeps the logits": (loop("kept.append(model.logits.output.save())"), 8),
    "keeps the best tokens": (loop("kept.append(model.logits.output.topk(5)[1].save())"), 8),
    "keeps the tokens": (loop("kept.append((step, model.samples.output.save()))"), 8),
    "bans a token": (
        loop("x = model.logits.output\nkept.append(x.argmax(-1))\nx[:, 3::5] = -100\nkept.append(x.argmax(-1))"),
        8,
    ),
    "assigns the logits": (
        loop("model.logits.output = model.logits.output.roll(1, -1)\nkept.append(model.samples.output)"),
        8,
    ),
    "a layer and the logits": (
        loop(
            "h = model.model.layers[1].output[0]\nh += vector\nkept.append(h.save())\nx = model.logits.output\n"
            "kept.append(x.save())\nx[:, :128] += vector"
        ),
        8,
    ),
    "a layer decides on the logits": (
        loop(
            "h = model.model.layers[1].output[0][-1:] * 2\nseen = seen + h\nx = model.logits.output\n"
            "x[:, :128] += torch.where(seen[:, :1] > 0, h, -h)\nbest = torch.maximum(best, x[:, :128] + seen)",
            before="seen = torch.zeros(1, 128)\nbest = torch.zeros(1, 128)",
            after="both = [seen, best].save()",
        ),
        8,
    ),
    "logits later": (loop("kept.append(model.logits.output.argmax(-1))", "tracer.iter[3:7]"), 3),
    "decides on a value": (
        loop("h = model.model.layers[1].output[0]\nif float(h[-1, 3]) > 0:\n    h[:] += vector\n" + KEEP),
        8,
    ),
    "keeps at times": (
        loop("h = model.model.layers[1].output[0]\nif h[-1, 3] > 0:\n    kept.append([step, h.clone()])"),
        9,
    ),
    "keeps numbers": (
        loop("h = model.model.layers[1].output[0]\nkept.append((h[-1, 3].item(), bool(h[-1, 4] > 0)))"),
        9,
    ),
    "is no plan": (loop(KEEP + "\nif model.model.layers[1].output[0].sum() > 1e9:\n    print(step)"), 0),
    "leaves out steps": (loop(KEEP, "tracer.iter[1::2]"), 0),
    "the first steps": (loop(KEEP, "tracer.iter[0:5]"), 4),
    "the prompt's step and one more": (loop(KEEP, "tracer.iter[:2]", after="print(len(kept))"), 1),
    "keeps the last row": (loop("kept.append(model.model.layers[1].output[0][-1].save())"), 9),
    "keeps rows of its prompt": (loop("kept.append(model.blocks[1].resid_post[:3].double())"), 9),
    "counts its rows": (loop("h = model.model.layers[1].output[0]\nkept.append((len(h), h[len(h) - 1].save()))"), 9),
    "changes the last row": (loop("h = model.model.layers[1].output[0]\nh[-1] += vector\nkept.append(h.clone())"), 9),
    "does something else with the prompt": (
        loop("h = model.model.layers[1].output[0]\nh *= 0.5 if step == 0 else 2.0\n" + KEEP),
        9,
    ),
    "leaves the prompt alone": (
        loop("if step > 0:\n    model.model.layers[0].output[0][:] += vector\n" + KEEP),
        9,
    ),
    "is a program after the prompt": (
        loop("h = model.model.layers[1].output[0]\nif step:\n    h = torch.tanh(h)\nkept.append(h.clone())"),
        9,
    ),
    "is no plan after the prompt": (
        loop(
            "h = model.model.layers[1].output[0]\nkept.append(h.clone())\nif step > 0 and h.sum() > 1e9:\n    h.save()"
        ),
        1,
    ),
    "carries the last row": (
        loop(
            "h = model.model.layers[1].output[0]\nkept.append(h - old)\nold = h[-1]",
            before="import torch\nold = torch.zeros(128)",
            after="old.save()",
        ),
        9,
    ),
    "carries the prompt's rows": (
        loop("h = model.model.layers[1].output[0]\nkept.append(h - old[-1])\nold = h", before="old = vector[None]"),
        7,
    ),
    "reads before the loop": (loop(KEEP, before="kept.append(model.model.layers[0].output[0].save())"), 8),
    "a weight before the loop": (
        loop("kept.append(model.model.layers[1].output[0] - w[0])", before="w = model.lm_head.weight[:1].clone()"),
        8,
    ),
    "records before the loop": (loop(KEEP, before="found = tracer.cache(modules=[model.model.layers[0]])"), 0),
}


def block(text: str, number: int, **sampling: Any) -> Block:
    vector = torch.linspace(-1, 1, HIDDEN) * (number + 1)
    return Block(
        PROMPTS[number],
        text,
        {"max_tokens": STEPS, "ignore_eos": True, **sampling},
        {"vector": vector},
    )


def same(one: Any, other: Any) -> None:
    """Compare two saved values bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        same(list(one.values()), list(other.values()))
    elif isinstance(one, Cache):
        assert one.entries.keys() == other.entries.keys()
        for mine, theirs in zip(one.entries.values(), other.entries.values(), strict=True):
            same([visit.output for visit in mine], [visit.output for visit in theirs])
    else:
        assert one == other


def check_same(one: Ran, other: Ran) -> None:
    assert one.state is Ended.DONE and other.state is Ended.DONE, (one.failure, other.failure)
    assert one.token_ids == other.token_ids
    assert one.saved.keys() == other.saved.keys()
    for name in one.saved:
        same(one.saved[name], other.saved[name])


def in_tables(engine: LocalEngine) -> int:
    """Return how many steps of loops have run in the tables so far."""
    loops = engine.interleaver.loops
    return loops.steps if loops is not None else 0


def test_invokes_that_share_nothing_that_changes_are_in_the_tables(engines: tuple[LocalEngine, LocalEngine]) -> None:
    steers = loop("model.model.layers[0].output[0][:] += 2 * vector\n" + KEEP)
    before = in_tables(engines[1])
    shared = {"vector": torch.linspace(-1, 1, HIDDEN)}
    rans = []
    for engine in engines:
        blocks = [block(steers, 0), block(loop(KEEP), 1), block(steers, 2)]
        rans.append(engine.run(*(replace(one, captured=shared) for one in blocks)))
    for one, other in zip(*rans, strict=True):
        check_same(one, other)
    assert in_tables(engines[1]) - before == 3 * STEPS, engines[1].interleaver.loops.refused


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_what_its_block_gives(engines: tuple[LocalEngine, LocalEngine], name: str) -> None:
    text, steps = LOOPS[name]
    before = in_tables(engines[1])
    rans = [
        engine.run_traces([[block(text, 0)], [block(text, 1)]], plain=(PROMPTS[2],), plain_tokens=STEPS)
        for engine in engines
    ]
    for one, other in zip(rans[0][:2], rans[1][:2], strict=True):
        check_same(one, other)
    assert rans[0][2].token_ids == rans[1][2].token_ids
    assert in_tables(engines[1]) - before == 2 * steps, engines[1].interleaver.loops.refused
    for ran in rans[1][:2]:
        told = account(ran)
        assert told.tiers.get("graph", 0) == steps and sum(told.tiers.values()) == told.steps


def test_a_prompt_beside_loops_moves_no_rows(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """The step after the one with the prompt has the same requests and other rows."""
    rans = []
    for engine in engines:
        blocks = [block(LOOPS["adds a vector"][0], i % 3, max_tokens=3 if i == 0 else STEPS) for i in range(8)]
        rans.append(engine.run_traces([[one] for one in blocks], plain=([9, 8, 7, 6] * 3,), plain_tokens=STEPS))
    for one, other in zip(rans[0][:8], rans[1][:8], strict=True):
        check_same(one, other)
    assert rans[0][8].token_ids == rans[1][8].token_ids


def test_a_loop_that_leaves_numbers_that_are_not_finite_fails_alone(engines: tuple[LocalEngine, LocalEngine]) -> None:
    text = loop("model.model.layers[0].output[0][:] *= 1e39")
    plain = engines[1].plain(PROMPTS[2], max_tokens=STEPS).token_ids
    for engine in engines:
        ran, other = engine.run_traces([[block(text, 0)]], plain=(PROMPTS[2],), plain_tokens=STEPS)
        assert ran.state is Ended.FAILED and ran.failure is not None and "finite" in ran.failure.message, ran.failure
        assert other.token_ids == plain == engine.plain(PROMPTS[2], max_tokens=STEPS).token_ids


def test_a_loop_that_is_given_up_leaves_nothing(engines: tuple[LocalEngine, LocalEngine]) -> None:
    engine = engines[1]
    for body, steps in ((KEEP, 4), ("h = model.model.layers[1].output[0]\nh[:] = torch.tanh(h)", 4), (KEEP, 1)):
        engine.give_up(block(loop(body, before="import torch"), 0), steps)
        assert engine.interleaver.idle and not engine.interleaver.loops


@pytest.mark.parametrize("tokens", [1, 2, STEPS])
def test_short_prompts_and_short_generations(engines: tuple[LocalEngine, LocalEngine], tokens: int) -> None:
    before = in_tables(engines[1])
    rans = []
    for engine in engines:
        lone = replace(block(loop(KEEP), 0, max_tokens=tokens), prompt=[7])
        rans.append(engine.run_traces([[lone], [block(loop(KEEP), 1, max_tokens=tokens)]], plain=(PROMPTS[2],)))
    for one, other in zip(rans[0][:2], rans[1][:2], strict=True):
        check_same(one, other)
    assert in_tables(engines[1]) - before == 2 * tokens


@pytest.mark.parametrize("text", ["1 / 0\n", "tracer.stop()\n", "print(tracer.result)\n", "import torch\n"])
def test_a_block_that_ends_before_its_loop(engines: tuple[LocalEngine, LocalEngine], text: str) -> None:
    """It may start before its first step, and ends as in that step."""
    over = "tracer.iter[3:3]" if text == "import torch\n" else "tracer.iter[:]"
    one, other = (engine.run(block(text + loop(KEEP, over), 0))[0] for engine in engines)
    for ran in (one, other):
        if ran.failure is not None:
            ran.failure.trace_id = ""
    assert (one.state, one.failure, one.token_ids, one.logs) == (
        other.state,
        other.failure,
        other.token_ids,
        other.logs,
    )


def test_prompts_beside_each_other(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """Prompts of taps, of a plain request and of a block that runs as it is, in one step."""
    rans = []
    for engine in engines:
        steers = loop("model.blocks[0].resid_post[:] += vector\n" + KEEP)
        texts = [steers, LOOPS["is no plan"][0], loop(KEEP, "tracer.iter[1:]"), LOOPS["keeps the last row"][0]]
        blocks = [block(text, i % 3) for i, text in enumerate(texts)]
        rans.append(engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],) * 2, plain_tokens=STEPS))
    for one, other in zip(*rans, strict=True):
        assert one.token_ids == other.token_ids
        if one.state is not None:
            check_same(one, other)


def test_requests_that_come_and_go_get_what_their_blocks_give(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """More requests than the batch has places, of all kinds of block and lengths: they join and leave in any step."""
    texts = [text for text, _ in LOOPS.values()]
    rans = []
    for engine in engines:
        blocks = [
            block(text, i % 3, max_tokens=2 + (5 * i) % 13)
            for i, text in enumerate([*texts, *reversed(texts)])
            if "torch.stack" not in text  # fails where a generation is short
        ]
        rans.append(engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],) * 3, plain_tokens=30))
    for i, (one, other) in enumerate(zip(*rans, strict=True)):
        assert (i, one.token_ids) == (i, other.token_ids)
        if one.state is not None:
            check_same(one, other)
