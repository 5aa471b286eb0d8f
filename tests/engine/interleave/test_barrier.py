"""Invokes that wait for each other: what one has at a place of the model, another uses there, in the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interpose
from interpose.v1.value_pb2 import Barrier, Value
from tests.engine.conftest import Bench
from tests.engine.harness import Block
from tests.engine.notebook import notebook
from tests.oracle import Edit, difference

CLEAN = [5, 400, 17, 99, 256]
OTHER = [3, 77, 410, 8, 21, 300]
LONG = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


def module(bench: Bench, model: Any, layer: int) -> Any:
    blocks = model.transformer.h if bench.arch == "gpt2" else model.model.layers
    return blocks[layer].mlp


def path(bench: Bench, layer: int) -> str:
    return f"{bench.block(layer)}.mlp"


def patched(row: torch.Tensor) -> Any:
    def apply(value: torch.Tensor) -> torch.Tensor:
        value[-1] = row
        return value

    return apply


@pytest.mark.parametrize("clean_first", [True, False])
def test_patching_at_the_same_module(bench: Bench, clean_first: bool) -> None:
    """Whichever of the two comes first; the one that gives goes on unharmed."""
    model = notebook(bench.engine)
    mlp = module(bench, model, 1)
    with model.trace(temperature=0.0) as tracer:
        barrier = tracer.barrier(2)
        if clean_first:
            with tracer.invoke(CLEAN):
                clean = mlp.output
                barrier()
                given = model.logits.output.save()
        with tracer.invoke(OTHER):
            barrier()
            mlp.output[-1] = clean[-1]
            logits = model.logits.output.save()
        if not clean_first:
            with tracer.invoke(CLEAN):
                clean = mlp.output
                barrier()
                given = model.logits.output.save()
    row = bench.oracle.run(CLEAN).value(path(bench, 1))[-1]
    truth = bench.oracle.run(OTHER, 1, [Edit(path(bench, 1), "output", patched(row))])
    assert difference(logits, truth.logits[0]) <= 1e-4
    assert difference(given, bench.oracle.run(CLEAN).logits[0]) <= 1e-4
    assert difference(truth.logits[0], bench.oracle.run(OTHER).logits[0]) > 1e-3


def test_exchanging_at_the_same_module(bench: Bench) -> None:
    """Both read, both write, where they are, after each has seen the other's value."""
    model = notebook(bench.engine)
    mlp = module(bench, model, 2)
    with model.trace(temperature=0.0) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN):
            one = mlp.output.clone()
            barrier()
            mlp.output[-1] = other[-1]  # noqa: F821
            logits = model.logits.output.save()
        with tracer.invoke(OTHER):
            other = mlp.output.clone()
            barrier()
            mlp.output[-1] = one[-1]
            logits_of_other = model.logits.output.save()
    rows = [bench.oracle.run(prompt).value(path(bench, 2))[-1] for prompt in (CLEAN, OTHER)]
    for found, prompt, row in ((logits, CLEAN, rows[1]), (logits_of_other, OTHER, rows[0])):
        truth = bench.oracle.run(prompt, 1, [Edit(path(bench, 2), "output", patched(row))])
        assert difference(found, truth.logits[0]) <= 1e-4


def test_a_barrier_in_every_step_and_others_beside_it(bench: Bench) -> None:
    """The same barrier, again and again; a third prompt of the trace, and a plain request, run as they would alone."""
    model = notebook(bench.engine)
    mlp = module(bench, model, 1)
    logits, beside = [], []
    with model.trace(**LONG) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN):
            for _step in tracer.iter[:]:
                row = mlp.output[-1].clone()
                barrier()
        with tracer.invoke(CLEAN[:2]):
            for _step in tracer.iter[:]:
                beside.append(model.logits.output.save())
        with tracer.invoke(OTHER):
            for _step in tracer.iter[:]:
                barrier()
                mlp.output[-1] = row
                logits.append(model.logits.output.save())
    clean = bench.oracle.run(CLEAN, 4)
    edits = [
        Edit(path(bench, 1), "output", patched(clean.value(path(bench, 1), "output", step)[-1]), steps={step})
        for step in range(4)
    ]
    for found, expected in zip(logits, bench.oracle.run(OTHER, 4, edits).logits, strict=True):
        assert difference(found, expected) <= 1e-4
    for found, expected in zip(beside, bench.oracle.run(CLEAN[:2], 4).logits, strict=True):
        assert difference(found, expected) <= 1e-4


def test_three_at_a_barrier_and_a_pair_at_another(bench: Bench) -> None:
    model = notebook(bench.engine)
    first, second = module(bench, model, 0), module(bench, model, 2)
    with model.trace(temperature=0.0) as tracer:
        everybody, pair = tracer.barrier(3), tracer.barrier(2)
        order = [].save()
        for number, prompt in enumerate((CLEAN, OTHER, CLEAN[:3])):
            with tracer.invoke(prompt):
                if number < 2:
                    order.append(("at", number, first.output.shape[0]))
                    pair()
                    order.append(("paired", number))
                second.output
                everybody()
                order.append(("all", number))
    assert order[:2] == [("at", 0, 5), ("at", 1, 6)]
    assert sorted(order[2:4]) == [("paired", 0), ("paired", 1)]
    assert sorted(order[4:]) == [("all", 0), ("all", 1), ("all", 2)]


def test_a_save_of_anothers_value_is_a_snapshot(bench: Bench) -> None:
    """Also when its owner, who is still at its place, changes it afterwards."""
    model = notebook(bench.engine)
    mlp = module(bench, model, 1)
    with model.trace(temperature=0.0) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(OTHER):
            barrier()
            kept = clean.save()  # noqa: F821
        with tracer.invoke(CLEAN):
            clean = mlp.output
            barrier()
            clean[:] = 0
            logits = model.logits.output.save()
    assert difference(kept, bench.oracle.run(CLEAN).value(path(bench, 1))) <= 1e-4
    truth = bench.oracle.run(CLEAN, 1, [Edit(path(bench, 1), "output", torch.zeros_like)])
    assert difference(logits, truth.logits[0]) <= 1e-4


def test_what_lies_before_the_barrier_has_passed(bench: Bench) -> None:
    model = notebook(bench.engine)
    early, late = module(bench, model, 0), module(bench, model, 1)
    with pytest.raises(interpose.OutOfOrder, match="had already passed") as caught:
        with model.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(CLEAN):
                late.output
                barrier()
                fine = model.logits.output.save()
            with tracer.invoke(OTHER):
                barrier()
                early.output
    assert caught.value.frames[-1].text.strip() == "early.output"
    assert difference(fine, bench.oracle.run(CLEAN).logits[0]) <= 1e-4


@pytest.mark.parametrize(
    ("end", "why", "what_the_other_gets"),
    [
        ("return", "1 waited at barrier 1 .of 2. and 0 more could come", "0 more could come"),
        ("fail", "ZeroDivisionError", "0 more could come"),
        ("stop", "1 waited at barrier 1 .of 2. and 0 more could come", "0 more could come"),
        ("late", "the generation (had )?ended", "ended"),
    ],
)
def test_who_waits_for_nobody_gets_an_error(bench: Bench, end: str, why: str, what_the_other_gets: str) -> None:
    """At its own line, in the step in which the other ends; no request hangs."""
    model = notebook(bench.engine)
    mlp = module(bench, model, 1)
    with pytest.raises(interpose.InterposeError, match=why):
        with model.trace(temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            barrier = tracer.barrier(2)
            caught = [].save()
            with tracer.invoke(CLEAN):
                h = mlp.output
                if end == "fail":
                    1 / 0
                if end == "stop":
                    tracer.stop()
                if end != "return":
                    tracer.result
                    barrier()
            with tracer.invoke(OTHER):
                try:
                    barrier()
                except Exception as error:
                    caught.append(str(error))
                    raise
    assert bench.engine.interleaver.idle
    [message] = caught
    assert what_the_other_gets in message


def test_catching_the_error_of_a_barrier_does_not_hang(bench: Bench) -> None:
    """What is caught again and again is bounded as any loop of a block is."""
    model = notebook(bench.engine)
    with pytest.raises(interpose.DeadlineExceeded):
        with model.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(CLEAN):
                if CLEAN[0] == 0:
                    barrier()
            with tracer.invoke(OTHER):
                while True:
                    try:
                        barrier()
                    except Exception:
                        pass


def test_two_that_pass_without_end_are_stopped(bench: Bench) -> None:
    model = notebook(bench.engine)
    with pytest.raises(interpose.InvalidArgument, match="passed 1000 times in one step"):
        with model.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            for prompt in (CLEAN, OTHER):
                with tracer.invoke(prompt):
                    while True:
                        barrier()


def test_an_outer_value_and_an_earlier_invoke(bench: Bench) -> None:
    """Companions wait for what any of them reads of an invoke before; a later one reads what they left."""
    model = notebook(bench.engine)
    mlp = module(bench, model, 1)
    scale = 1.0
    with model.trace(temperature=0.0) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN[:1]):
            mlp.output
            scale = 3.0
        with tracer.invoke(CLEAN):
            clean = mlp.output * scale
            barrier()
        with tracer.invoke(OTHER):
            barrier()
            mlp.output[-1] = clean[-1]
            logits = model.logits.output.save()
        with tracer.invoke(CLEAN[:2]):
            after = (logits + 0).save()
    row = bench.oracle.run(CLEAN).value(path(bench, 1))[-1] * 3
    truth = bench.oracle.run(OTHER, 1, [Edit(path(bench, 1), "output", patched(row))])
    assert difference(logits, truth.logits[0]) <= 1e-4
    assert torch.equal(after, logits)


def test_a_barrier_without_companions_is_refused(bench: Bench) -> None:
    """A block waits only for blocks that the engine starts with it, whatever a client sends."""
    held = {"barrier": Value(barrier=Barrier(number=0, count=2))}
    [one] = bench.engine.run(Block(CLEAN, "barrier()", captured=held, gang=1))
    assert one.failure is not None and "0 more could come" in one.failure.message
    [alone] = bench.engine.run(Block(CLEAN, "barrier()", captured=held))
    assert alone.failure is not None and "no other invokes to wait for" in alone.failure.message
    other = {"barrier": Value(barrier=Barrier(number=0, count=3))}
    both = [Block(CLEAN, "barrier()", captured=held, gang=2), Block(OTHER, "barrier()", captured=other, gang=2)]
    failures = [ran.failure for ran in bench.engine.run(*both)]
    assert all(failure is not None and "barrier" in failure.message for failure in failures)


def test_companions_that_do_not_start_in_one_step_are_refused(bench: Bench) -> None:
    """The scheduler lets those apart that no step has room for; a block says so instead of waiting."""
    held = {"barrier": Value(barrier=Barrier(number=0, count=2))}
    long = [7] * 200
    bench.engine.reschedule(True, True, 256)
    try:
        blocks = [Block(long, "barrier()", captured=held, gang=2) for _ in range(2)]
        for ran in bench.engine.run(*blocks):
            assert ran.failure is not None and "could not start in one step" in ran.failure.message
    finally:
        bench.engine.reschedule(True, True, 8192)
