"""Loops of sandboxed blocks as plans: the same values as by turns, and nothing but plans from a hostile process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.block.mediator import Mediator
from executor.core.ended import Ended
from executor.core.request import Opened
from executor.parallel.agreement import Alone
from executor.sandbox import planned
from executor.sandbox.channel import ChildEnd, Kind
from executor.sandbox.planned import Room
from executor.sandbox.pool import Pool
from executor.sandbox.runner import SandboxRunner
from executor.sandbox.trace import SandboxedTrace, Terms
from executor.saves.collect import Limits
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.block.parts import driven, state
from tests.unit.executor.plan.test_portable import GOOD, HOSTILE
from tests.unit.executor.sandbox.parts import BlockRun, Worker
from tests.unit.executor.sandbox.test_lies import ANSWER, TREE, Liar, fails, liar
from tests.unit.executor.sandbox.test_runner import imported, same

__all__ = ["liar"]  # a fixture
STEPS = 6
LOOP = "kept = []\nfor step in tracer.iter[:]:\n"

# Blocks, and how many of their steps run as plans: not the prompt's, and not the first of one row, which shows the forms.
BLOCKS = {
    "a layer saved": (LOOP + "    kept.append(model.layers[1].output[0].save())\nresult = tracer.result.save()", 4),
    "a name saved": ("for step in tracer.iter[:]:\n    h = model.layers[1].output[0].save()", 4),
    "steered": (
        LOOP + "    model.layers[0].output[0][:] += vector * 2\n    kept.append(model.layers[1].output[0].save())",
        4,
    ),
    "scaled and read again": (
        LOOP + "    model.layers[0].linear.output[:] *= 1.5\n    kept.append(model.layers[0].linear.output.save())",
        4,
    ),
    "assigned": (
        LOOP
        + "    model.layers[0].linear.output = model.layers[0].linear.output * 2 + 1\n"
        + "    kept.append(model.layers[1].output[0].save())",
        4,
    ),
    "an input changed": (
        LOOP + "    model.layers[1].input[0] = 0.5\n    kept.append(model.layers[1].linear.input.save())",
        4,
    ),
    "ablated": (
        LOOP
        + "    model.layers[0].output[0][:, [1, 3]] = 0\n    h = model.layers[1].output[0]\n    kept.append(h[:, 2:4].save())",
        4,
    ),
    "ablated by a direction": (
        LOOP
        + "    h = model.layers[0].output[0]\n    h -= (h @ unit)[:, None] * unit\n"
        + "    kept.append(model.layers[1].output[0].save())",
        4,
    ),
    "an autoencoder": (
        LOOP
        + "    h = model.layers[0].output[0]\n    acts = torch.relu((h - bias) @ weights + 0.1)\n"
        + "    h[:] = acts @ weights.T + bias\n    kept.append(acts.save())",
        4,
    ),
    "a probe": (LOOP + "    kept.append(torch.sigmoid(model.layers[1].output[0] @ unit).save())", 4),
    "a probe by number": (
        LOOP + "    kept.append((model.layers[1].output[0] @ unit).sum().item())\ninterpose.save(kept)",
        4,
    ),
    "a lens": (
        LOOP
        + "    h = torch.nn.functional.layer_norm(model.layers[0].output[0], (8,))\n"
        + "    values, indices = (h @ weights).softmax(-1).topk(3)\n"
        + "    kept.append(values.save())\n    kept.append(indices.save())",
        4,
    ),
    "a root mean square": (
        LOOP
        + "    h = model.layers[0].output[0]\n    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)\n"
        + "    kept.append(h.norm(dim=-1).save())",
        4,
    ),
    "a total": (
        "total = torch.zeros(8)\nfor step in tracer.iter[:]:\n    total = total + model.layers[1].output[0].sum(0)\ntotal.save()",
        4,
    ),
    "a total in place": (
        "total = torch.zeros(8).save()\nfor step in tracer.iter[:]:\n    total += model.layers[1].output[0].sum(0)",
        4,
    ),
    "by the step": (
        LOOP
        + "    if step > 3:\n        model.layers[0].output[0][:] *= 0\n    kept.append(model.layers[1].output[0].save())",
        3,
    ),
    "a value decides": (
        LOOP
        + "    h = model.layers[0].output[0]\n    if h.sum() > 0:\n        h[:] *= 2\n"
        + "    kept.append(model.layers[1].output[0].save())",
        4,
    ),
    "a bounded loop": (
        "kept = []\nfor step in tracer.iter[1:5]:\n    model.layers[0].output[0][:] += 1\n"
        "    kept.append(model.layers[1].output[0].save())\nafter = len(kept)\nend = tracer.result.save()",
        2,
    ),
    "two loops": (
        "kept = []\nfor step in tracer.iter[1:3]:\n    kept.append(model.layers[0].output[0].save())\n"
        "for step in tracer.iter[3:]:\n    kept.append(model.layers[0].output[0].save())",
        3,
    ),
    "a dict": (
        "kept = {}\nfor step in tracer.iter[:]:\n    kept[step] = model.layers[1].output[0][:, 0]\ninterpose.save(kept)",
        4,
    ),
    "a function": (
        "def scaled(x):\n    return x * 3 + bias\n"
        + LOOP
        + "    kept.append(scaled(model.layers[1].output[0]).save())",
        4,
    ),
    "an index of values": (
        LOOP + "    h = model.layers[0].output[0][0]\n    kept.append(h[h.topk(2).indices].save())",
        0,
    ),
    "random numbers": (
        LOOP + "    model.layers[0].output[0][:] += torch.randn(8)\n    kept.append(model.layers[1].output[0].save())",
        0,
    ),
    "prints": (LOOP + "    print(step)\n    kept.append(model.layers[1].output[0].save())", 0),
    "an error in a later step": (
        LOOP + "    kept.append(model.layers[1].output[0].save())\n    if step == 4:\n        kept.nothing",
        2,
    ),
    "a stop": (
        LOOP + "    kept.append(model.layers[1].output[0].save())\n    if step == 4:\n        tracer.stop()",
        0,
    ),
}


FLUSHED = (
    "a layer saved",
    "steered",
    "a total",
    "a total in place",
    "a dict",
    "a bounded loop",
    "an error in a later step",
)


def captured() -> dict[str, Any]:
    torch.manual_seed(1)
    unit = torch.nn.functional.normalize(torch.randn(8), dim=0)
    return {"vector": torch.randn(8), "unit": unit, "bias": torch.randn(8), "weights": torch.randn(8, 8)}


def planned_steps(ran: BlockRun) -> int:
    assert ran.accounting is not None
    return sum(tier.steps for tier in ran.accounting.tiers if tier.tier == "plan")


@pytest.mark.parametrize(("name", "flushed"), [(name, False) for name in BLOCKS] + [(name, True) for name in FLUSHED])
def test_a_planned_loop_gives_what_it_gives_by_turns(
    processes: Pool, monkeypatch: pytest.MonkeyPatch, name: str, flushed: bool
) -> None:
    source, steps = BLOCKS[name]
    if flushed:  # the block gets what each step left at once
        monkeypatch.setattr(planned, "_MOST_WAITING_STEPS", 1)
    by_turns = Worker(processes, 60.0).run(imported(source), STEPS, **captured())
    worker = Worker(processes, 60.0, plans=True)
    as_plan = worker.run(imported(source), STEPS, **captured())
    assert same(by_turns.saved, as_plan.saved), (by_turns.saved, as_plan.saved)
    assert same(by_turns.outputs, as_plan.outputs) and same(by_turns.beside, as_plan.beside)
    assert (by_turns.logs, by_turns.ended) == (as_plan.logs, as_plan.ended)
    assert (by_turns.failure is None) == (as_plan.failure is None), (by_turns.failure, as_plan.failure)
    if by_turns.failure is not None and as_plan.failure is not None:
        assert by_turns.failure.message == as_plan.failure.message
        assert list(by_turns.failure.frames) == list(as_plan.failure.frames)
    assert (planned_steps(by_turns), planned_steps(as_plan)) == (0, steps)
    assert by_turns.accounting is not None and as_plan.accounting is not None
    served = [[(one.location, one.served) for one in ran.accounting.locations] for ran in (by_turns, as_plan)]
    assert served[0] == served[1]
    if name != "a value decides":  # a plan writes either way
        assert list(by_turns.accounting.locations) == list(as_plan.accounting.locations)
    room = worker.interleaver._requests._sandboxed._room
    assert room is not None and room._left == room.most_bytes, "a plan has left something behind"
    if not flushed and as_plan.failure is None:
        here = worker.run(imported(source), STEPS, trusted=True, **captured())
        assert same(here.saved, as_plan.saved) and same(here.outputs, as_plan.outputs)


def test_a_block_by_turns_goes_on_where_there_is_no_room(processes: Pool) -> None:
    worker = Worker(processes, 60.0, plans=True)
    worker.interleaver._requests._sandboxed._room = Room(10)
    source, _ = BLOCKS["steered"]
    ran = worker.run(imported(source), STEPS, **captured())
    assert ran.failure is None and planned_steps(ran) == 0


# Hostile processes.


def block(liar: Liar) -> tuple[Mediator, Room]:
    """Return a block that waits for its second step, whose process is the liar."""
    nothing: Any = None
    terms = Terms(1.0, 1 << 28, Limits(1 << 10, 1 << 20), nothing, nothing, nothing)
    opened = Opened(pb.Trace(id="trace", invokes=[pb.Invoke()]), "", None)
    trace = SandboxedTrace(opened, liar.process, Alone(), terms, 0)
    of, room = state(), Room(1 << 30)
    mediator = driven(of, SandboxRunner(of, trace, TREE, nothing, room))
    of.progress.step = 0
    waits = {**ANSWER, "waits": ("", "step", 1, "")}
    liar.answers(lambda end: end.send(Kind.ANSWER, waits))
    mediator.start()
    assert of.ending.ended is None
    mediator.begin_step()
    return mediator, room


OFFER = {"plan": GOOD, "until": 100, "why": "", "later": False}
OFFERS: dict[str, Any] = {
    "nothing": None,
    "too little": {"plan": None},
    "no reason": {**OFFER, "plan": None, "why": 5},
    "a location that was not seen": OFFER,
    "steps that have passed": {**OFFER, "until": 1},
    "steps of another type": {**OFFER, "until": "100"},
    "steps without an end": {**OFFER, "until": 1 << 60},
    **{
        f"a plan with {name}": {**OFFER, "plan": HOSTILE[name]}
        for name in ("code", "as_strided", "a cycle", "a huge tensor")
    },
    "a million nodes": {**OFFER, "plan": HOSTILE["a node too many"]},
}


@pytest.mark.parametrize("name", OFFERS)
def test_an_offer_that_is_no_plan_fails_the_invoke(liar: Liar, name: str) -> None:
    mediator, room = block(liar)
    liar.answers(lambda end: end.send(Kind.ANSWER, OFFERS[name]))
    mediator.resume(True)
    assert "the sandboxed process of the block was ended" in fails(mediator).message
    assert not liar.process.open and room._left == room.most_bytes


def test_a_process_that_offers_nothing_in_time_is_ended(liar: Liar) -> None:
    mediator, _ = block(liar)
    liar.answers(lambda end: None)
    mediator.resume(True)
    ending = mediator.state.ending
    assert ending.ended is Ended.FAILED and ending.failure is not None
    assert ending.failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED


def test_a_block_that_offers_no_plan_goes_on_by_turns(liar: Liar) -> None:
    mediator, _ = block(liar)

    def refuse(end: ChildEnd) -> None:
        end.send(Kind.ANSWER, {**OFFER, "plan": None, "why": "x" * 10_000})
        assert end.next()[0] is Kind.RESUME
        end.send(Kind.ANSWER, {**ANSWER, "waits": ("", "step", 2, "")})

    liar.answers(refuse)
    mediator.resume(True)
    assert mediator.state.ending.ended is None and len(mediator.state.record.tally.why) < 1000
