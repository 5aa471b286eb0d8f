"""Standing edits run inside the requests that name them, before the request's own block, and in no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from executor.core.ended import Ended
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, Ran, close

PROMPT = [5, 6, 7, 8]
VECTOR = torch.linspace(-3, 3, 128)


@pytest.fixture(autouse=True)
def _no_edits_left(bench: Bench) -> Iterator[None]:
    yield
    bench.engine.applied = []


def run(bench: Bench, source: str = "", *edits: pb.Edit, plain: bool = False, **sampling: object) -> list[Ran]:
    bench.engine.applied = list(edits)
    return bench.engine.run(Block(PROMPT, source, sampling=sampling), plain=(PROMPT,) if plain else ())


def layer(bench: Bench) -> str:
    return expression(bench.block(1)) + ".mlp"


def test_the_block_sees_what_the_edits_made(bench: Bench) -> None:
    at = layer(bench)
    read = f"seen = {at}.output.save()\nlogits = model.logits.output.save()\n"
    steer = bench.engine.edit("steer", f"{at}.output[:] += vector", vector=VECTOR)
    double = bench.engine.edit("double", f"{at}.output = {at}.output * 2")
    [before, plain_before] = run(bench, read, plain=True)
    [steered, plain_beside] = run(bench, read, steer, plain=True)
    [both] = run(bench, read, steer, double)
    [other_way] = run(bench, read, double, steer)
    [after, _] = run(bench, read, plain=True)  # beside the same: kernels on GPUs round by the size of the batch
    assert close(steered.saved["seen"], before.saved["seen"] + VECTOR)
    assert close(both.saved["seen"], (before.saved["seen"] + VECTOR) * 2)
    assert close(other_way.saved["seen"], before.saved["seen"] * 2 + VECTOR)
    assert not close(steered.saved["logits"], before.saved["logits"])
    bench.engine.applied = []
    write = f"{at}.output[:] += vector\n{read}"
    [by_hand] = bench.engine.run(Block(PROMPT, write, captured={"vector": VECTOR}))
    assert close(steered.saved["logits"], by_hand.saved["logits"])
    assert torch.equal(after.saved["logits"], before.saved["logits"])
    assert plain_beside.token_ids == plain_before.token_ids


def test_a_plain_prompt_under_an_edit_of_every_step(bench: Bench) -> None:
    at = layer(bench)
    every = f"for step in tracer.iter[:]:\n    {at}.output[:] += vector"
    [edited] = run(bench, "", bench.engine.edit("steer", every, vector=VECTOR), max_tokens=6, ignore_eos=True)
    bench.engine.applied = []
    sampling = {"max_tokens": 6, "ignore_eos": True}
    [by_hand, untouched] = bench.engine.run_traces(
        [[Block(PROMPT, every, sampling, {"vector": VECTOR})], [Block(PROMPT, "", sampling)]]
    )
    assert edited.failure is None and len(edited.token_ids) == 6
    assert edited.token_ids == by_hand.token_ids != untouched.token_ids


def test_an_edit_that_waits_longer_than_the_block(bench: Bench) -> None:
    late = bench.engine.edit(
        "late", f"for step in tracer.iter[2:4]:\n    {layer(bench)}.output[:] += vector", vector=VECTOR
    )
    source = f"first = {layer(bench)}.output.save()\nprint('block')"
    [edited] = run(bench, source, late, bench.engine.edit("loud", "print('edit')"), max_tokens=6, ignore_eos=True)
    assert edited.failure is None and sorted(edited.logs.split()) == ["block", "edit"]
    [without] = run(bench, source, max_tokens=6, ignore_eos=True)
    assert torch.equal(edited.saved["first"], without.saved["first"])
    assert edited.token_ids[:2] == without.token_ids[:2] and edited.token_ids != without.token_ids


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0", "in the edit 'bad': ZeroDivisionError: division by zero"),
        ("x = {at}.output.save()", "an edit saves nothing"),
        ("{at}.output[:] += 1\ntracer.stop()", "an edit does not end the requests"),
        ("{at}.output = torch.zeros(3)", "was assigned a tensor of shape [3]"),
        ("missing", "NameError"),
        ("for step in tracer.iter[3]:\n    pass", "step 3 was never reached"),
        ("def f(:", "the edit 'bad' cannot run: the server's Python cannot compile"),
    ],
)
def test_an_edit_that_fails_fails_the_request_that_named_it(bench: Bench, source: str, words: str) -> None:
    bad = pb.Edit(
        name="bad", program=pb.Program(source=source.format(at=layer(bench)), filename="<edit>", first_line=1)
    )
    for name, field, value in (
        ("model", "module", ""),
        ("tracer", "tracer", True),
        ("torch", "python_module", "torch"),
    ):
        setattr(bad.program.reads.add(name=name).value, field, value)
    [ran, plain] = run(bench, f"seen = {layer(bench)}.output.save()\nfound = tracer.result", bad, plain=True)
    assert ran.failure is not None and words in ran.failure.message, ran.failure
    assert "'bad'" in ran.failure.message and ran.state is Ended.FAILED
    assert len(plain.token_ids) == 4
    assert bench.engine.interleaver.idle


def test_names_of_an_edit_are_its_own(bench: Bench) -> None:
    first = bench.engine.edit("first", f"x = 1\nrows = []\n{layer(bench)}.output[:] += x")
    [ran] = run(bench, f"seen = {layer(bench)}.output.save()\nx", first)
    assert ran.failure is not None and "NameError" in ran.failure.message
    bench.engine.applied = [bench.engine.edit("adds", f"acc = [1]\n{layer(bench)}.output[:] += 0")]
    [one, two] = bench.engine.run(
        Block(PROMPT, f"{layer(bench)}.output\nacc.append(2)"), Block(PROMPT, "acc.append(3)"), shared={"acc": []}
    )
    assert one.failure is None and two.failure is None
    assert sorted(next(iter((one.updates | two.updates).values()))) == [2, 3]


def test_a_block_that_stops(bench: Bench) -> None:
    every = bench.engine.edit("every", f"for step in tracer.iter[:]:\n    {layer(bench)}.output[:] += 1")
    [ran] = run(bench, f"seen = {layer(bench)}.output.save()\ntracer.stop()", every, max_tokens=9, ignore_eos=True)
    assert ran.state is Ended.STOPPED and ran.failure is None and len(ran.token_ids) == 1 and "seen" in ran.saved
