"""An invoke without a prompt sees the rows of all prompts of its trace, and of nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interpose
from executor.core.ended import Ended
from interpose.v1.value_pb2 import Value
from tests.engine.conftest import Bench
from tests.engine.harness import Block
from tests.engine.notebook import notebook
from tests.oracle import Edit, difference

ONE = [5, 400, 17, 99, 256]
TWO = [3, 77]
THREE = [8, 21, 300, 9]
PLAIN = [44, 45, 46]


def layers(bench: Bench, model: Any) -> Any:
    return model.transformer.h if bench.arch == "gpt2" else model.model.layers


def test_reads_the_rows_of_all_in_the_order_of_the_invokes(bench: Bench) -> None:
    model = notebook(bench.engine)
    mlp = layers(bench, model)[1].mlp
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(ONE):
            own = mlp.output.save()
        with tracer.invoke() as whole:
            rows = mlp.output.save()
            logits = model.logits.output.save()
            tokens = model.samples.output.save()
            results = tracer.result.save()
        with tracer.invoke(TWO) as two:
            pass
    path = f"{bench.block(1)}.mlp"
    truth = [bench.oracle.run(prompt) for prompt in (ONE, TWO)]
    assert difference(rows, torch.cat([one.value(path) for one in truth])) <= 1e-4
    assert difference(logits, torch.cat([one.logits[0] for one in truth])) <= 1e-4
    assert difference(own, truth[0].value(path)) <= 1e-4
    assert tokens.tolist() == [one.tokens for one in truth]
    assert [one.token_ids for one in results] == [one.tokens for one in truth]
    assert [one.prompt_token_ids for one in results] == [ONE, TWO]
    assert two.result.token_ids == truth[1].tokens
    assert (whole.accounting.prompt_tokens, whole.accounting.generated_tokens, whole.accounting.steps) == (7, 2, 1)
    with pytest.raises(interpose.InvalidArgument, match="generates nothing"):
        whole.result


def test_writes_reach_every_prompt_of_the_trace_and_nobody_else(bench: Bench) -> None:
    """In place and by assignment; requests that run beside it keep their own values."""
    path = f"{bench.block(1)}.mlp"
    at = "model." + ("transformer.h" if bench.arch == "gpt2" else "model.layers")
    ends = {"max_tokens": 3, "ignore_eos": True}
    save = "logits = []\nfor step in tracer.iter[:]:\n    logits.append(model.logits.output.save())\n"
    for write in (f"{at}[1].mlp.output[:] = 0.25\n", f"{at}[1].mlp.output = {at}[1].mlp.output * 0 + 0.25\n"):
        mine = [
            Block(ONE, save, ends, gang=2),
            Block(TWO, save, ends, gang=2),
            Block([], write + save, joint=True),
        ]
        other = [Block(THREE, save, ends)]
        *rans, plain = bench.engine.run_traces([mine, other], plain=(PLAIN,))
        one, two, whole, beside = rans
        assert [ran.failure for ran in rans] == [None] * 4
        edits = [Edit(path, "output", lambda value: value * 0 + 0.25, steps={0})]
        truths = [bench.oracle.run(ONE, 3, edits), bench.oracle.run(TWO, 3, edits), bench.oracle.run(THREE, 3)]
        for ran, truth in zip((one, two, beside), truths, strict=True):
            for found, expected in zip(ran.saved["logits"], truth.logits, strict=True):
                assert difference(found, expected) <= 1e-4
        for step, found in enumerate(whole.saved["logits"]):
            assert difference(found, torch.cat([truth.logits[step] for truth in truths[:2]])) <= 1e-4
        assert plain.token_ids == bench.oracle.run(PLAIN, 4).tokens
        assert whole.accounting is not None
        written = {entry.location: entry.written for entry in whole.accounting.locations}
        assert written[f"{path}.output"] == 1
    assert difference(truths[0].logits[0], bench.oracle.run(ONE).logits[0]) > 1e-3


def test_the_rows_of_those_that_still_generate(bench: Bench) -> None:
    model = notebook(bench.engine)
    mlp = layers(bench, model)[2].mlp
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        rows, logits = [].save(), [].save()
        with tracer.invoke(ONE, max_tokens=1):
            pass
        with tracer.invoke(TWO, max_tokens=4):
            pass
        with tracer.invoke(THREE, max_tokens=2):
            model.logits.output
        with tracer.invoke():
            for _step in tracer.iter[:]:
                rows.append(mlp.output.clone())
                logits.append(model.logits.output.clone())
    path = f"{bench.block(2)}.mlp"
    lengths = {0: (ONE, 1), 1: (TWO, 4), 2: (THREE, 2)}
    truths = {number: bench.oracle.run(prompt, steps) for number, (prompt, steps) in lengths.items()}
    assert len(rows) == 4
    for step in range(4):
        still = [truths[number] for number, (_, steps) in lengths.items() if step < steps]
        assert difference(rows[step], torch.cat([truth.value(path, "output", step) for truth in still])) <= 1e-4
        assert difference(logits[step], torch.cat([truth.logits[step] for truth in still])) <= 1e-4


def test_turns_at_one_place_follow_the_order_of_the_invokes(bench: Bench) -> None:
    """What one wrote, the next sees, whichever of the two has the prompt; both writes are in the model."""
    model = notebook(bench.engine)
    mlp = layers(bench, model)[1].mlp
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(ONE):
            mlp.output[0] = 1.0
        with tracer.invoke():
            seen = mlp.output.save()
            mlp.output[:, 0] = 2.0
        with tracer.invoke(TWO):
            after = mlp.output.save()
            mlp.output[:, 1] = 3.0
            logits = model.logits.output.save()
    path = f"{bench.block(1)}.mlp"
    first, second = (bench.oracle.run(prompt).value(path).clone() for prompt in (ONE, TWO))
    first[0] = 1.0
    assert difference(seen, torch.cat([first, second])) <= 1e-4
    second[:, 0] = 2.0
    assert difference(after, second) <= 1e-4
    second[:, 1] = 3.0
    truth = bench.oracle.run(TWO, 1, [Edit(path, "output", lambda value: second)])
    assert difference(logits, truth.logits[0]) <= 1e-4


def test_applied_modules_views_and_inputs(bench: Bench) -> None:
    model = notebook(bench.engine)
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(ONE):
            pass
        with tracer.invoke(TWO):
            pass
        with tracer.invoke():
            stream = model.blocks[2].resid_post
            stream[:] = stream * 2
            z = model.blocks[3].attn.z.save()
            lens = model.logits(model.final_norm(model.blocks[3].resid_post)).save()
    assert z.shape[0] == lens.shape[0] == len(ONE) + len(TWO) and z.dim() == 3
    rows = []
    for prompt in (ONE, TWO):
        with model.trace(prompt, temperature=0.0):
            model.blocks[2].resid_post = model.blocks[2].resid_post * 2
            rows.append(model.logits(model.final_norm(model.blocks[3].resid_post)).save())
    assert difference(lens, torch.cat(rows)) <= 1e-4


def test_names_pass_between_the_blocks(bench: Bench) -> None:
    model = notebook(bench.engine)
    first, mlp = layers(bench, model)[0].mlp, layers(bench, model)[1].mlp
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(ONE):
            early = first.output[-1].clone()
        with tracer.invoke():
            target = mlp.output  # what the other has assigned is here when this block has waited for a place after it
            target[:] = early
        with tracer.invoke(TWO):
            logits = model.logits.output.save()
    row = bench.oracle.run(ONE).value(f"{bench.block(0)}.mlp")[-1]
    truth = bench.oracle.run(TWO, 1, [Edit(f"{bench.block(1)}.mlp", "output", lambda value: row.expand_as(value))])
    assert difference(logits, truth.logits[0]) <= 1e-4


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("tracer.stop()", "without a prompt has none"),
        ("model.blocks[1].attn.pattern", "one prompt's"),
        ("1 / 0", "ZeroDivisionError"),
        ("mlp.skip(0)", "without a prompt has none"),
    ],
)
def test_what_is_a_prompts_own(bench: Bench, line: str, why: str) -> None:
    """It fails alone: the blocks of the prompts end as they would."""
    path = bench.block(1)
    at = "model." + ("transformer.h[1]" if bench.arch == "gpt2" else "model.layers[1]")
    source = f"mlp = {at}.mlp\n{line}\n"
    save = "logits = model.logits.output.save()"
    blocks = [Block(ONE, save, gang=2), Block(TWO, save, gang=2), Block([], source, joint=True)]
    one, two, whole = bench.engine.run(*blocks)
    assert whole.failure is not None and why in whole.failure.message, path
    assert whole.failure.invoke == 2
    for ran, prompt in ((one, ONE), (two, TWO)):
        assert ran.failure is None
        assert difference(ran.saved["logits"], bench.oracle.run(prompt).logits[0]) <= 1e-4


def test_a_prompt_that_fails_leaves_the_others(bench: Bench) -> None:
    save = "rows = []\nfor step in tracer.iter[:]:\n    rows.append(model.logits.output.save())"
    ends = {"max_tokens": 3, "ignore_eos": True}
    blocks = [Block(ONE, "1 / 0", ends, gang=2), Block(TWO, save, ends, gang=2), Block([], save, joint=True)]
    one, two, whole = bench.engine.run(*blocks)
    assert one.failure is not None and two.failure is None and whole.failure is None
    truth = bench.oracle.run(TWO, 3)
    assert [rows.shape[0] for rows in whole.saved["rows"]][1:] == [1, 1]
    for found, expected in zip(whole.saved["rows"], truth.logits, strict=True):
        assert difference(found[-1:], expected) <= 1e-4


def test_a_block_that_cannot_be_bound_fails_alone(bench: Bench) -> None:
    save = "logits = model.logits.output.save()"
    blocks = [
        Block(ONE, save, gang=1),
        Block([], "tracer.result", captured={"tracer": Value(module="nowhere")}, joint=True),
    ]
    one, whole = bench.engine.run(*blocks)
    assert whole.failure is not None and "no module 'nowhere'" in whole.failure.message
    assert difference(one.saved["logits"], bench.oracle.run(ONE).logits[0]) <= 1e-4


def test_a_whole_block_counts_for_eviction(bench: Bench) -> None:
    """As long as it may see a request's rows, the request is not given up for another's."""
    ends = {"max_tokens": 3, "ignore_eos": True}
    seen = "for step in tracer.iter[:]:\n    model.logits.output"
    ended: list[Ended] = []
    take = bench.engine.interleaver.take_ended
    bench.engine.interleaver.take_ended = lambda: ended.extend(take().values()) or {}
    try:
        bench.engine.run(Block(ONE, "", ends, gang=1), Block([], seen, joint=True))
    finally:
        bench.engine.interleaver.take_ended = take
    assert not ended
