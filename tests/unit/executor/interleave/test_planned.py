"""Loops of all forms run as plans inside a worker's runner, and go on in the greenlet where no plan is."""

from __future__ import annotations

import pytest
import torch

from executor.block.tally import LONGEST_REASON, MOST_REASONS, Precision, Tally
from executor.core.ended import Ended
from executor.interleave.plans import Plans
from interpose.contract.accounting import Accounting
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.plan.bench import TREE, Request, Run, same, steps_of
from tests.unit.executor.plan.test_cases import block, names

STEPS = 8
KEEP = "kept.append((step, model.layers[1].mlp.output.save()))"

# A name, the block, and in how many of its 8 steps a plan runs.
LOOPS = {
    "all steps": (block(KEEP), 6),
    "a bounded loop": (block(KEEP, loop="for step in tracer.iter[1:5]:"), 3),
    "every third step": (block(KEEP, loop="for step in tracer.iter[1::3]:"), 2),
    "a list of steps": (block(KEEP, loop="for step in tracer.iter[[1, 2, 5]]:"), 2),
    "one step": (block(KEEP, loop="for step in tracer.iter[3]:"), 0),
    "a loop to a step that never comes": (block(KEEP, loop="for step in tracer.iter[:20]:"), 6),
    "all()": (block(KEEP, loop="for step in tracer.all():"), 6),
    "a with": (block(KEEP, loop="with tracer.iter[1:] as step:"), 6),
    "two loops": (
        block(KEEP, loop="for step in tracer.iter[1:4]:", after=f"for step in tracer.iter[4:7]:\n    {KEEP}\n    last = step"),
        5,
    ),
    "code after the loop": (
        block(KEEP, loop="for step in tracer.iter[1:4]:", after="print(step, len(kept))"),
        2,
    ),
    "the result after the loop": (block(KEEP, after="print(tracer.result)\nnumber = [step, len(kept)].save()"), 6),
    "another location from step 5 on": (
        block(
            "if step > 4:\n    model.layers[2].mlp.output[:] = 0\nkept.append(model.logits.output.save())",
            loop="for step in tracer.iter[1:]:",
        ),
        5,
    ),
    "a location before the loop": (block(KEEP, before="first = model.layers[0].mlp.output.save()"), 6),
    "a step without a location": (block("if step % 2:\n    continue\n" + KEEP), 6),
    "a carried tensor of the prompt's rows": (
        block("h = model.logits.output\nif old is not None:\n    kept.append((h - old[-1]).save())\nold = h", "old = None"),
        6,
    ),
    "a block that is no plan": (block(KEEP + "\nif model.layers[2].mlp.output.sum() > 0:\n    print(step)"), 0),
    "a default dtype of the block's own": (
        block("kept.append(model.layers[1].mlp.output + torch.zeros(1))", "torch.set_default_dtype(torch.float64)"),
        0,
    ),
    "a loop in a function": (
        block("pass", f"def run():\n    for step in tracer.iter[1:]:\n        {KEEP}", "run()", "for _ in [0]:"),
        0,
    ),
    "a function that reads the loop's name": (
        block("h = model.layers[1].mlp.output\nkept.append(f().save())", "def f():\n    return h * 2"),
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_what_the_greenlet_gives(name: str) -> None:
    text, planned = LOOPS[name]
    inputs, plans = steps_of(2, STEPS), Plans(TREE)
    plain = Run(text, [names(i) for i in range(2)]).go(inputs)
    other = Run(text, [names(i) for i in range(2)], plans=plans).go(inputs)
    same(plain, other)
    reasons = [str(request.planned.refused) for request in other.requests if request.planned is not None]
    assert plans.steps == 2 * planned, reasons
    for request in other.requests:
        assert tiers(request).get("plan", 0) == planned and sum(tiers(request).values()) == STEPS


def tiers(request: Request) -> dict[str, int]:
    """Return how many steps of a request ran in each tier."""
    state = request.mediator.state
    precision = Precision(torch.float32, torch.float32, "", "highest")
    told = Accounting.of(state.record.tally.accounting(0, state.steps, 0, 0, precision))
    assert told.reasons == {} or "" not in told.reasons
    return told.tiers


def test_the_account_says_which_line_keeps_a_loop_from_plans() -> None:
    plans = Plans(TREE)
    text = block("h = model.layers[1].mlp.output\nif h.norm() > 3:\n    x = h.save()")
    [request] = Run(text, [names(0)], plans=plans).go(steps_of(1, STEPS)).requests
    precision = Precision(torch.float32, torch.float32, "", "highest")
    told = Accounting.of(request.mediator.state.record.tally.accounting(0, STEPS, 0, 0, precision))
    assert told.tiers == {"block": STEPS}
    assert any(why.startswith("line 5: ") and "torch.where" in why for why in told.reasons)


def test_reasons_are_bounded() -> None:
    tally = Tally()
    for number in range(1000):
        tally.ran("block", 1, f"{number}" * 500)
    message = tally.accounting(0, 1000, 0, 0, Precision(torch.float32, torch.float32, "", "highest"))
    assert len(message.tiers) <= MOST_REASONS + 1 and sum(one.steps for one in message.tiers) == 1000
    assert all(len(one.why) <= LONGEST_REASON for one in message.tiers)


def failure_of(text: str, plans: Plans | None) -> pb.Failure:
    """Return why a block fails."""
    run = Run(text, [names(0)], plans=plans)
    with pytest.raises(AssertionError):
        run.go(steps_of(1, STEPS))
    ending = run.requests[0].mediator.state.ending
    assert ending.ended is Ended.FAILED and ending.failure is not None
    return ending.failure


def test_a_step_that_never_comes_is_named_by_its_own_number() -> None:
    text = block(KEEP, loop="for step in tracer.iter[[1, 2, 3, 30]]:")
    plans = Plans(TREE)
    plain, planned = failure_of(text, None), failure_of(text, plans)
    assert plans.steps == 2 and "step 30 was never reached" in planned.message
    assert planned.message == plain.message


def test_steps_that_do_not_rise_fail_as_they_do_without_plans() -> None:
    text = block(KEEP, loop="for step in tracer.iter[[1, 2, 3, 2]]:")
    plans = Plans(TREE)
    plain, planned = failure_of(text, None), failure_of(text, plans)
    assert plans.steps == 2 and plain.code == planned.code == pb.ERROR_CODE_OUT_OF_ORDER


def test_code_after_the_loop_fails_at_its_own_line() -> None:
    text = block(KEEP, loop="for step in tracer.iter[1:4]:", after="1 / 0")
    plans = Plans(TREE)
    plain, planned = failure_of(text, None), failure_of(text, plans)
    assert plans.steps == 2 and planned.frames == plain.frames and planned.frames[-1].text == "1 / 0"


def test_a_cancelled_request_ends_while_a_plan_waits() -> None:
    plans = Plans(TREE)
    run = Run(block(KEEP), [names(0)], plans=plans)
    [request] = run.requests
    request.finish = request.mediator.cancel  # type: ignore[method-assign]
    run.go(steps_of(1, STEPS))
    assert plans.steps == 6 and request.mediator.state.ending.ended is Ended.CANCELLED
    assert len(request.names["kept"]) == STEPS


def test_requests_with_one_block_share_its_plan() -> None:
    plans = Plans(TREE)
    Run(block(KEEP + "\nmodel.layers[2].mlp.output[:] += v"), [names(i) for i in range(3)], plans=plans).go(
        steps_of(3, STEPS)
    )
    assert plans.cache.made == 1 and plans.steps == 18
