"""Every invoke is told where it was served, where it wrote, and in what precision."""

from __future__ import annotations

from vllm.platforms import current_platform

from interpose.contract.accounting import Accounting
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, Ran
from tests.oracle import Edit, difference

PROMPT = [5, 400, 17, 99, 256]


def account(ran: Ran) -> Accounting:
    assert ran.accounting is not None
    return Accounting.of(ran.accounting)


def test_locations_are_counted_over_the_steps(bench: Bench) -> None:
    mlp = bench.block(1) + ".mlp"
    at = expression(mlp)
    source = (
        f"for step in tracer.iter[:]:\n    x = {at}.input\n    if step:\n        {at}.output[:] = 0\n"
        f"    else:\n        y = {at}.output + {at}.output\n    model.logits.output\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source, {"max_tokens": 4, "ignore_eos": True}))
    assert ran.failure is None, ran.failure
    seen = account(ran)
    assert seen.served == {f"{mlp}.input": 4, f"{mlp}.output": 4, "logits.output": 4}
    assert seen.written == {f"{mlp}.output": 3}
    assert (seen.steps, seen.prompt_tokens, seen.generated_tokens) == (4, 5, 4)


def test_a_block_that_ends_early_took_part_in_its_steps_only(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, "x = model.logits.output", {"max_tokens": 6, "ignore_eos": True}))
    seen = account(ran)
    assert (seen.steps, seen.generated_tokens) == (1, 6)
    assert seen.served == {"logits.output": 1}
    assert not seen.written


def test_every_step_has_a_tier(bench: Bench) -> None:
    """A block that waits for a later step is idle; the tests may run with plans."""
    source = "for step in tracer.iter[2:]:\n    x = model.logits.output\n    print(step)\n"
    [ran] = bench.engine.run(Block(PROMPT, source, {"max_tokens": 5, "ignore_eos": True}))
    seen = account(ran)
    assert seen.tiers == {"block": 4, "idle": 1} and seen.steps == 5
    assert all(why.startswith("plans: false") or "line 3: print" in why or "prompt" in why for why in seen.reasons)
    assert sum(seen.reasons.values()) == 4


def test_the_precision_is_the_engines(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, "x = model.logits.output"))
    seen = account(ran)
    assert (seen.dtype, seen.kv_cache_dtype, seen.matmul) == ("float32", "float32", "highest")
    assert seen.attention == ("CPU_ATTN" if current_platform.is_cpu() else "TRITON_ATTN")


def test_invokes_have_an_account_each_and_failed_ones_too(bench: Bench) -> None:
    first, second = bench.engine.run(
        Block(PROMPT, "model.logits.output[:] = 0"), Block([1, 2], "model.logits.output\nmodel.samples.output\n1 / 0")
    )
    assert account(first).written == {"logits.output": 1}
    assert second.failure is not None
    assert account(second).served == {"logits.output": 1, "samples.output": 1}
    assert account(second).prompt_tokens == 2


def test_changes_to_copies_and_results_are_the_blocks_own(bench: Bench) -> None:
    at = expression(bench.block(1) + ".mlp")
    source = (
        f"h = {at}.output\nmine = h.clone()\ntwice = h * 2\n{at}.output = twice\nmodel.logits.output\n"
        "mine += 1\ntwice[:] = 0\nmine.save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    assert account(ran).written == {f"{bench.block(1)}.mlp.output": 1}


def test_tokens_of_a_prompt_from_the_cache_are_counted(bench: Bench) -> None:
    """What the block changes in later steps is what transformers gives for it, and the next request has nothing of it."""
    ids = [5 + 37 * i % 480 for i in range(150)]
    at = expression(bench.block(1) + ".mlp")
    later = f"first = model.logits.output.save()\nfor step in tracer.iter[1:]:\n    {at}.output[:] = 0\n"
    rans = [bench.engine.run(Block(ids, later, {"max_tokens": 3, "ignore_eos": True}))[0] for _ in range(2)]
    truth = bench.oracle.run(ids, 3, [Edit(f"{bench.block(1)}.mlp", "output", lambda value: value * 0, steps={1, 2})])
    for ran, cached in zip(rans, (0, 128), strict=True):
        assert ran.failure is None, ran.failure
        seen = account(ran)
        assert (seen.prompt_tokens, seen.cached_tokens, ran.cached) == (150, cached, cached)
        assert ran.token_ids == truth.tokens
        assert difference(ran.saved["first"], truth.logits[0]) <= 1e-4
    [wrong] = bench.engine.run(Block(ids, f"x = {at}.output.save()", prefix=True))
    assert wrong.failure is not None and "may have come from the prefix cache" in wrong.failure.message
    [whole] = bench.engine.run(Block(ids, f"x = {at}.output.save()"))
    assert whole.cached == account(whole).cached_tokens == 0
    assert difference(whole.saved["x"], truth.value(f"{bench.block(1)}.mlp", step=0)) <= 1e-4


def test_prompts_that_begin_alike_in_one_step(bench: Bench) -> None:
    """The second takes from the cache what the first fills in that step."""
    ids = [6, *(5 + 37 * i % 480 for i in range(150))]
    source = "first = model.logits.output.save()"
    pair = bench.engine.run_traces([[Block(one, source)] for one in (ids, [*ids, 9])])
    assert [ran.cached for ran in pair] == [0, 128]
    for ran, one in zip(pair, (ids, [*ids, 9]), strict=True):
        assert difference(ran.saved["first"], bench.oracle.run(one).logits[0]) <= 1e-4
