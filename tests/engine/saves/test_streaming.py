"""A streamed trace's increments: together they are what the plain trace saves, and each carries only what is new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from interpose.results.assembly import Assembly, blobs_of
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, Ran, _Results

PROMPT = [5, 400, 17, 99, 256]
LONG = {"max_tokens": 6, "ignore_eos": True}


class Read:
    """The saved names of a streamed invoke after each increment, and at the end."""

    def __init__(self, bench: Bench, ran: Ran, captured: dict[int, Any] | None = None) -> None:
        blobs = bench.engine.worker.interpose_outbox.blobs
        assembly = Assembly(captured or {}, _Results())
        self.sizes: list[int] = []
        self.lengths: list[dict[str, int]] = []
        for increment in ran.increments:
            self.sizes.append(increment.ByteSize())
            assembly.buffers.update({blob.id: blobs.pop(blob.id) for blob in blobs_of(increment)})
            assembly.add(increment)
            self.lengths.append(
                {name: len(value) for name, value in assembly.names.items() if hasattr(value, "__len__")}
            )
        self.names = assembly.names


def same(left: Any, right: Any) -> bool:
    """Whether two saved values are equal, tensors to the bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


STEPS = "for s in tracer.iter[:]:\n    "
BLOCKS = {
    "rows": f"rows = [].save()\n{STEPS}rows.append(model.logits.output[0])\n",
    "not saved itself": f"rows = []\n{STEPS}rows.append(model.logits.output.save())\n",
    "rebound": f"{STEPS}row = model.logits.output.save()\nresult = tracer.result.save()\n",
    "accumulated in place": f"total = torch.zeros(1).save()\n{STEPS}total += model.logits.output.max()\n",
    # It is the tensor's memory on CPUs only.
    "through a numpy view": (
        f"a = torch.zeros(3, device='cpu').save()\nview = a.numpy()\n{STEPS}model.logits.output\n    view[0] += 1\n"
    ),
    "dropped": f"x = model.logits.output.save()\n{STEPS}x = s\ny = [1].save()\n",
    "deleted": "x = model.logits.output.save()\nmodel.logits.next()\nmodel.logits.output\ndel x\ny = [1].save()\n",
    "dict": (
        "d = {'n': 0, 'rows': {}}.save()\n"
        f"{STEPS}d['n'] += 1\n    d['rows'][s] = model.logits.output.save()\n    d.pop(s - 1, None)\n    d[s] = s\n"
    ),
    "dict in another order": f"d = {{'a': 1, 'b': 2}}.save()\n{STEPS}model.logits.output\n    d['a'] = d.pop('a')\n",
    "set": f"seen = set().save()\n{STEPS}seen.add(model.samples.output.item())\n    seen.discard(0)\n",
    "list changed everywhere": (
        f"x = [0, [1], 2].save()\n{STEPS}model.logits.output\n    x.insert(0, [s])\n    x[-1] = s\n    x[s][0:] = [s, s]\n"
        "x.pop()\nx.reverse()\n"
    ),
    "itself": f"x = [].save()\nx.append(x)\n{STEPS}model.logits.output\n    x.append((s, x))\nn = len(x)\nx.clear()\n",
    "large": f"rows = [].save()\n{STEPS}rows.append(model.logits.output.expand(100, -1).clone())\n",
    "ends early": "a = model.logits.output.save()\nb = [1, a].save()\n",
    "stops": f"a = [].save()\n{STEPS}a.append(model.logits.output)\n    if s == 2:\n        tracer.stop()\n",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_increments_together_are_what_the_plain_trace_saves(bench: Bench, name: str) -> None:
    block = Block(PROMPT, BLOCKS[name], LONG)
    [plain] = bench.engine.run(block)
    [ran] = bench.engine.run_streamed(block)
    assert plain.failure is None, plain.failure
    assert ran.failure is None, ran.failure
    assert ran.saved == {} and ran.state == plain.state and ran.token_ids == plain.token_ids
    read = Read(bench, ran)
    assert plain.saved
    if name == "itself":  # it holds itself, so it cannot be compared
        assert read.names["x"] == plain.saved["x"] == []
        return
    assert read.names.keys() == plain.saved.keys()
    assert all(same(read.names[key], plain.saved[key]) for key in plain.saved)


def test_an_increment_for_each_step_and_one_at_the_end(bench: Bench) -> None:
    [ran] = bench.engine.run_streamed(Block(PROMPT, BLOCKS["rows"], LONG))
    assert [one.sequence for one in ran.increments] == list(range(7))
    assert [one.steps for one in ran.increments] == [1, 2, 3, 4, 5, 6, 6]
    assert [lengths["rows"] for lengths in Read(bench, ran).lengths] == [1, 2, 3, 4, 5, 6, 6]
    # The block waits for a step that does not come, so it may always have more to say.
    assert [one.last for one in ran.increments] == [False] * 6 + [True]


def test_nothing_is_sent_after_the_block_has_ended(bench: Bench) -> None:
    [ran] = bench.engine.run_streamed(Block(PROMPT, BLOCKS["ends early"], LONG))
    assert [(one.steps, one.last) for one in ran.increments] == [(1, True), (1, True)]
    assert not ran.increments[1].names and not ran.increments[1].objects.values


def test_bytes_grow_with_the_steps_not_with_their_square(bench: Bench) -> None:
    """Each of 200 steps saves one row and moves one row."""
    at = expression(bench.block(2))
    source = f"rows, notes = [].save(), {{}}.save()\n{STEPS}rows.append({at}.output[0][-1])\n    notes[s] = s\n"
    [ran] = bench.engine.run_streamed(Block(PROMPT, source, {"max_tokens": 200, "ignore_eos": True}))
    read = Read(bench, ran)
    assert len(read.names["rows"]) == len(read.names["notes"]) == 200
    row = read.names["rows"][0].nbytes
    assert max(read.sizes[1:]) <= row + 200
    assert sum(read.sizes) <= 201 * (row + 200)


def test_a_captured_list_grows_while_the_trace_runs(bench: Bench) -> None:
    store: dict[str, Any] = {"rows": ["before"], "other": []}
    rows = store["rows"]
    source = f"{STEPS}store['rows'].append(model.logits.output.save())\n"
    [plain] = bench.engine.run(Block(PROMPT, source, LONG, captured={"store": store}))
    [ran] = bench.engine.run_streamed(Block(PROMPT, source, LONG, captured={"store": store}))
    assert ran.updates == {}, "what was streamed is not sent again"
    mine = {index: store if isinstance(value, dict) else rows for index, value in plain.updates.items()}
    read = Read(bench, ran, {**mine, **{i: store["other"] for i in range(9) if i not in mine}})
    assert read.names["store"] is store and store["rows"] is rows
    assert rows[0] == "before" and same(rows[1:], plain.updates[next(i for i in mine if mine[i] is rows)][1:])


def test_invokes_have_increments_of_their_own(bench: Bench) -> None:
    rans = bench.engine.run_streamed(
        Block(PROMPT, BLOCKS["rows"], LONG),
        Block([9, 8, 7], BLOCKS["dict"], {"max_tokens": 3, "ignore_eos": True}),
        plain=(PROMPT,),
    )
    assert len(Read(bench, rans[0]).names["rows"]) == 6
    assert Read(bench, rans[1]).names["d"]["n"] == 3
    assert [ran.increments[0].invoke for ran in rans[:2]] == [0, 1]


def test_an_error_comes_after_what_was_saved_before_it(bench: Bench) -> None:
    source = f"rows = [].save()\n{STEPS}rows.append(model.logits.output)\n    if s == 2:\n        1 / 0\n"
    [ran] = bench.engine.run_streamed(Block(PROMPT, source, LONG))
    assert ran.failure is not None and ran.failure.exception_type == "ZeroDivisionError"
    assert len(ran.token_ids) == 3
    assert len(Read(bench, ran).names["rows"]) == 3
    assert [one.last for one in ran.increments] == [False, False, True, True]


REFUSED = {
    "cannot travel": (f"x = [].save()\n{STEPS}model.logits.output\n    x.append(object())\n", "object"),
    "another shape": (f"x = torch.zeros(2).save()\n{STEPS}model.logits.output\n    x.unsqueeze_(0)\n", "shape"),
    "too much": (f"x = [].save()\n{STEPS}x.append(torch.zeros(5 << 20))\n    model.logits.output\n", "64 MiB"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_ends_the_request(bench: Bench, name: str) -> None:
    source, words = REFUSED[name]
    [ran] = bench.engine.run_streamed(Block(PROMPT, source, {"max_tokens": 50, "ignore_eos": True}))
    assert ran.failure is not None and words in ran.failure.message, ran.failure
    assert ran.failure.code in (pb.ERROR_CODE_INVALID_ARGUMENT, pb.ERROR_CODE_QUOTA_EXCEEDED)
    assert ran.state is Ended.FAILED and len(ran.token_ids) < 10
    bench.engine.worker.interpose_outbox.blobs.clear()
