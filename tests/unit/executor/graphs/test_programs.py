"""Loops in programs, in padded batches whose rows move, give what greenlets give on the same rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from executor.graphs.extents import Full
from executor.graphs.operations import ALL, Refused
from executor.graphs.passes import CannotRun
from executor.graphs.programs import Programs
from executor.plan.compile import survey
from executor.plan.eligible import regions
from executor.plan.environment import Environment
from executor.plan.ir import Plan
from tests.unit.executor.graphs.rides import (
    ELEMENTWISE,
    LIMITS,
    SLOTS,
    Rides,
    compare,
    in_hooks,
    in_own_rows,
    machine,
    moved,
    names_here,
)
from tests.unit.executor.graphs.samples import CPU
from tests.unit.executor.plan.bench import HIDDEN, MODEL, SOURCES, Request
from tests.unit.executor.plan.test_cases import ELIGIBLE, block, names, plan_of
from tests.unit.executor.plan.test_decide import DECIDED, Chooser
from tests.unit.executor.plan.test_random import FLAGS, Author

# The cases of plans that can be programs: others have steps in which they read nothing.
NONE = ["every second step"]
EVERY = ELIGIBLE | DECIDED
CASES = [name for name in EVERY if name not in NONE]
SAE = ELIGIBLE["an autoencoder"][0]


def given_of(text: str, number: int = 0) -> tuple[Plan, Environment]:
    """Return the plan of a block, and what the block of a request reads."""
    request = Request(text, names(number), number)
    request.begin()
    [region] = regions(request.unit)
    return plan_of(text, number), survey(region, request.names, SOURCES.get)


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_what_the_greenlet_gives(name: str) -> None:
    body, before, after = EVERY[name]
    compare(Rides([block(body, before, after)] * 3, names, machine(), ahead=2).go(steps=6))


@pytest.mark.parametrize("name", CASES)
def test_a_program_for_its_own_rows_gives_what_the_greenlet_gives(name: str) -> None:
    body, before, after = EVERY[name]
    compare(Rides([block(body, before, after)] * 3, names, machine(), ahead=2, run=in_own_rows).go(steps=6))


@pytest.mark.parametrize("name", NONE)
def test_other_plans_are_refused(name: str) -> None:
    body, before, after = ELIGIBLE[name]
    with pytest.raises(Refused, match="reads no location"):
        joined(machine(), 0, block(body, before, after))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_programs_give_the_bits_of_the_greenlet(name: str, dtype: torch.dtype) -> None:
    with moved(CPU, dtype):
        rides = Rides([block(*ELEMENTWISE[name])] * 3, names_here, machine(), ahead=1).go(steps=6)
        rides.unstable.clear()  # a number that is one of each row is among them, and has its bits here too
        compare(rides)


def test_requests_of_several_programs_share_a_batch() -> None:
    texts = [block(*ELIGIBLE[name]) for name in ("an autoencoder", "a carried sum", "a masked gate", "the step before")]
    late = block(*ELIGIBLE["a carried sum in place"], loop="for step in tracer.iter[4:]:")
    rides = Rides([*texts, texts[1], late], names, machine(), ahead=1).go(steps=8)
    compare(rides)
    assert len(rides.keys) == 5  # the two carried sums share one


def test_elementwise_programs_are_stable() -> None:
    for name in ("a carried sum", "steering the stream", "an output is assigned", "the step before"):
        assert not Rides([block(*ELIGIBLE[name])] * 2, names, machine()).go(steps=5).unstable


def test_operations_that_may_be_off_are_named() -> None:
    assert Rides([block(SAE)], names, machine()).go(steps=5).unstable


@settings(max_examples=30, **FLAGS)
@given(st.randoms(use_true_random=False))
def test_random_programs(source: random.Random) -> None:
    before = "total, peak, seen = torch.zeros(()), torch.zeros(()), torch.zeros(()).save()"
    body = Author(source).body()
    text = block(body, before, "total.save(), peak.save()\nended = [total, peak, len(kept)].save()")
    note(text)
    compare(Rides([text] * 2, names, machine(), ahead=1).go(steps=5, seed=source.randrange(100)))


@settings(max_examples=20, **FLAGS)
@given(st.randoms(use_true_random=False))
def test_random_programs_that_decide(source: random.Random) -> None:
    before = "total, peak, seen = torch.zeros(()), torch.zeros(()), torch.zeros(()).save()"
    body = Chooser(source).body()
    text = block(body, before, "total.save(), peak.save()\nended = [total, peak, len(kept)].save()")
    note(text)
    compare(Rides([text] * 2, names, machine(), ahead=1).go(steps=5, seed=source.randrange(100)))


def test_the_last_steps_of_an_engine_that_runs_ahead_are_not_in_what_is_carried() -> None:
    text = block(*ELIGIBLE["a carried sum"])
    compare(Rides([text], names, machine(), ahead=3).go(steps=5))


def joined(programs: Programs, slot: int, text: str, number: int = 0, tenant: str = "a") -> str:
    plan, environment = given_of(text, number)
    return programs.join(slot, tenant, plan, environment, (1, ALL)).key


def test_large_constants_are_shared_where_their_contents_are_equal() -> None:
    limits = replace(LIMITS, shared_bytes=64)  # `shared` has 608 bytes, and `w` too
    programs = machine(limits)
    text = block("kept.append((model.layers[1].mlp.output @ shared).save())")
    one = joined(programs, 0, text, 0)
    used = programs.used
    assert joined(programs, 1, text, 1) == one and programs.used == used
    each = block("kept.append((model.layers[1].mlp.output @ w).save())")
    assert joined(programs, 2, each, 0) != joined(programs, 3, each, 1)
    assert joined(programs, 4, each, 1) == joined(programs, 5, each, 1)


def test_small_constants_are_each_requests_own() -> None:
    programs = machine()
    text = block("model.layers[1].mlp.output[:] += v * scale")
    assert joined(programs, 0, text, 0) == joined(programs, 1, text, 1)
    assert programs.made == 1


def test_a_number_of_another_dtype_keeps_its_rounding() -> None:
    programs = machine()
    text = block("model.layers[1].mlp.output[:] *= fine", "fine = (scale.double() * 3)")
    assert joined(programs, 0, text, 0) != joined(programs, 1, text, 1)
    compare(Rides([text] * 3, names, machine()).go(steps=4))


def test_constants_that_decide_a_shape_of_memory_are_equal_for_all() -> None:
    text = block("model.layers[1].mlp.output[:, index] *= 2", "index = torch.tensor([1, 4 + len(neurons)])")
    compare(Rides([text] * 3, names, machine()).go(steps=4))


def test_memory_is_bounded_and_programs_without_requests_go_first() -> None:
    gone: list[str] = []
    row = 19 * 4 * (SLOTS + 1)
    programs = machine(replace(LIMITS, program_bytes=2 * row, program_share=1.0), dropped=gone.append)
    texts = [block(f"model.layers[{i}].mlp.output[:] += v") for i in range(3)]
    first = joined(programs, 0, texts[0])
    joined(programs, 1, texts[1])
    used = programs.used
    with pytest.raises(Full):
        joined(programs, 2, texts[2])
    assert programs.used == used and 2 not in programs and not gone
    programs.leave(0)
    assert joined(programs, 0, texts[0]) == first  # it is there still
    programs.leave(0)
    joined(programs, 2, texts[2])
    assert gone == [first]
    programs.leave(1)
    assert joined(programs, 1, texts[0]) != first  # a graph with the old key holds memory that is gone


def test_a_tenant_has_a_share() -> None:
    row = 19 * 4 * (SLOTS + 1)
    programs = machine(replace(LIMITS, program_bytes=4 * row, program_share=0.25))
    texts = [block(f"model.layers[{i}].mlp.output[:] += v") for i in range(3)]
    joined(programs, 0, texts[0], tenant="a")
    with pytest.raises(Full):
        joined(programs, 1, texts[1], tenant="a")
    joined(programs, 1, texts[1], tenant="b")
    joined(programs, 2, texts[0], tenant="c")  # a program that is there already costs nothing


def test_what_a_program_leaves_is_bounded() -> None:
    programs = machine(replace(LIMITS, emitted_bytes=64))
    plan, environment = given_of(block("kept.append(model.layers[1].mlp.output.save())"))
    found = programs.join(0, "a", plan, environment, (1, ALL))
    with pytest.raises(Refused, match="a program leaves 19 elements"):
        programs._tables.join(0, "a", (), 1, found.emitted)
    assert 0 not in programs._tables


def test_a_location_spread_over_ranks_is_refused() -> None:
    programs = machine(spread=lambda path, kind, at: path == "layers.1.mlp")
    with pytest.raises(Refused, match="spread over ranks"):
        joined(programs, 0, block("model.layers[1].mlp.output[:] = 0"))
    joined(programs, 0, block("model.layers[0].mlp.output[:] = 0"))


def test_a_refused_plan_is_not_tried_again() -> None:
    programs = machine()
    text = block("h = model.layers[1].mlp.output\nkept.append(h.as_strided((3,), (2,)).save())")
    for _ in range(2):
        with pytest.raises(Refused, match="as_strided depends on how tensors lie in memory"):
            joined(programs, 0, text)
    assert programs.made == 0


def test_a_step_that_runs_twice_carries_on_once() -> None:
    programs = machine()
    tables = programs._tables
    plan, environment = given_of(block(*ELIGIBLE["a carried sum"]))
    found = programs.join(3, "a", plan, environment, (1, ALL))
    tables.join(3, "a", (), 1, found.emitted)
    later, _ = tables.begin_step([(SLOTS, 1), (3, 1)], {3: 1}, 4)
    x = torch.randn(4, HIDDEN)
    [start] = [share.start for share in later.shares.values()]
    left = []
    for keep in (True, False, False):
        if keep:
            with programs.unchanged([found.key]):
                in_hooks(programs, [found.key], x)
        else:
            in_hooks(programs, [found.key], x)
        left.append(tables.output[start : start + HIDDEN].clone())
    assert torch.equal(left[0], left[1]) and not torch.equal(left[1], left[2])
    torch.testing.assert_close(left[2], 2 * left[1])


def test_a_program_out_of_its_steps_changes_nothing() -> None:
    programs = machine()
    tables = programs._tables
    plan, environment = given_of(
        block("model.layers[1].mlp.output[:] = 0\ntotal = total + 1", "total = torch.zeros(1, 3)")
    )
    found = programs.join(2, "a", plan, environment, (3, 5))
    tables.join(2, "a", (), 1, found.emitted)
    x = torch.randn(2, HIDDEN)
    with torch.inference_mode():
        plain = MODEL(x.clone())
    for step in range(1, 7):
        later, _ = tables.begin_step([(2, 1), (SLOTS, 1)], {2: step}, 2)
        hidden = in_hooks(programs, [found.key], x)
        assert torch.equal(hidden[0], plain[0]) == (step not in (3, 4))
        assert torch.equal(hidden[1], plain[1])
        if step in (3, 4):
            share = later.shares[2]
            assert torch.equal(tables.output[share.start : share.start + 3], torch.full((3,), step - 2.0))
        else:
            assert not later.shares


def test_a_value_of_another_form_ends_the_pass_and_no_hook_stays() -> None:
    programs = machine()
    tables = programs._tables
    plan, environment = given_of(block("model.layers[1].mlp.output[:] = 0"))
    found = programs.join(2, "a", plan, environment, (1, ALL))
    tables.join(2, "a", (), 1, found.emitted)
    tables.begin_step([(2, 1)], {2: 1}, 1)
    with pytest.raises(CannotRun, match="another form"):
        in_hooks(programs, [found.key], torch.randn(1, 1, HIDDEN))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in MODEL.modules())


def test_a_slot_is_one_requests() -> None:
    programs = machine()
    text = block("model.layers[1].mlp.output[:] = 0")
    joined(programs, 0, text)
    for slot in (0, SLOTS):
        with pytest.raises(ValueError, match="is taken, or none"):
            joined(programs, slot, text)
    plan, environment = given_of(text)
    with pytest.raises(Refused, match="several rows of a request"):
        several: Any = replace(plan, rows=2, key="other")
        programs.join(1, "a", several, environment, (1, ALL))
