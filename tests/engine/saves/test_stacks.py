"""Saved containers come back as stacks with the values that they have without stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, Ran
from tests.engine.saves.test_streaming import LONG, PROMPT, STEPS, Read, same


def blocks(bench: Bench) -> dict[str, str]:
    """Blocks that save many tensors, by what they save."""
    layers = [expression(bench.block(layer)) + ".mlp" for layer in range(3)]
    each = "".join(f"    now.append({layer}.output)\n" for layer in layers)
    saved = "".join(f"    now.append({layer}.output.save())\n" for layer in layers)
    return {
        "steps of layers": f"rows = [].save()\n{STEPS}now = []\n{each}    rows.append(now)\n",
        "snapshots": f"rows = [].save()\n{STEPS}now = []\n{saved}    rows.append(tuple(now))\n    now[-1][:] = 0\n",
        "layers of steps": (
            f"rows = {{i: [] for i in range(3)}}.save()\n{STEPS}now = []\n{each}"
            "    [rows[i].append(one) for i, one in enumerate(now)]\n"
        ),
        "changed afterwards": (
            f"rows = [].save()\n{STEPS}now = []\n{each}    rows.extend(one.clone() for one in now)\n"
            "    rows[0] += 1\n    rows[-2] *= 2\n"
        ),
        "whole outputs": f"rows = [].save()\n{STEPS}rows.append([{layers[0]}.output.save(), {layers[1]}.output.save()])\n",
        "a cache": f"cache = tracer.cache(modules=['{bench.block(0)}', '{bench.block(2)}'])\n{STEPS}model.logits.output\n",
        "views of one tensor": f"rows = [].save()\n{STEPS}h = {layers[1]}.output\n    rows.extend([h[:1], h[-1:], h[:1]])\n",
        "half": f"rows = [].save()\n{STEPS}now = []\n{each}    rows.append([one.bfloat16()[-1] for one in now])\n",
    }


NAMES = (
    "steps of layers",
    "snapshots",
    "layers of steps",
    "changed afterwards",
    "whole outputs",
    "a cache",
    "views of one tensor",
    "half",
)


def entries(value: Any) -> Any:
    """A saved value with caches as dicts."""
    if hasattr(value, "refused"):
        return {name: [visit.output for visit in visits] for name, visits in value.entries.items()}
    return value


def kinds(messages: list[Any]) -> list[str | None]:
    return [value.WhichOneof("kind") for message in messages for value in message.objects.values]


def saves(ran: Ran) -> list[pb.Saves]:
    events = [pb.Event.FromString(data) for data in ran.events]
    return [event.saves for event in events if event.WhichOneof("kind") == "saves"]


def run_without_stacks(bench: Bench, block: Block, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Run a block for a client that cannot read stacks."""
    make = bench.engine.trace

    def trace(*arguments: Any) -> pb.Trace:
        made = make(*arguments)
        made.stacks = False
        return made

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "trace", trace)
        [ran] = bench.engine.run(block)
    return ran


@pytest.mark.parametrize("name", NAMES)
def test_the_same_values_with_stacks_and_without(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(PROMPT, blocks(bench)[name], LONG)
    old = run_without_stacks(bench, block, monkeypatch)
    [ran] = bench.engine.run(block)
    for one in (old, ran):
        assert one.failure is None, one.failure
    assert "stack" not in kinds(saves(old)) and kinds(saves(old)).count("tensor") >= 12
    assert "stack" in kinds(saves(ran)) and kinds(saves(ran)).count("tensor") <= 1
    wanted = {key: entries(value) for key, value in old.saved.items()}
    assert same({key: entries(value) for key, value in ran.saved.items()}, wanted)
    if name == "a cache":  # caches are not streamed
        return
    [streamed] = bench.engine.run_streamed(block)
    assert streamed.failure is None, streamed.failure
    assert "stack" in kinds(streamed.increments)
    assert same(Read(bench, streamed).names, wanted)


def test_saves_of_many_invokes(bench: Bench) -> None:
    """Invokes of one trace add to one list, and each keeps lists of its own."""
    at = expression(bench.block(1)) + ".mlp"
    source = f"own = [].save()\n{STEPS}h = {at}.output\n    own.append(h)\n    rows.append(h)\n"
    rans = bench.engine.run(Block(PROMPT, source, LONG), Block(PROMPT[:2], source, LONG), shared={"rows": []})
    assert [ran.failure for ran in rans] == [None, None]
    shared = [ran.saved["rows"] for ran in rans if "rows" in ran.saved] or [
        update for ran in rans for update in ran.updates.values()
    ]
    [rows] = shared
    own = [row for ran in rans for row in ran.saved["own"]]
    assert [len(ran.saved["own"]) for ran in rans] == [6, 6] and len(rows) == 12
    assert sorted(float(row.double().sum()) for row in rows) == sorted(float(row.double().sum()) for row in own)
    assert {len(row) for row in rows} >= {1, 2, 5}


def test_tensors_are_what_they_were_when_the_engine_goes_on(bench: Bench) -> None:
    """The engine writes over the memory of a step in the next step, and the lists keep what was there."""
    at = expression(bench.block(0)) + ".mlp"
    source = f"kept, sums = [].save(), [].save()\n{STEPS}h = {at}.output\n    kept.append(h)\n"
    source += "    sums.append(h.double().sum())\n"
    for run in (bench.engine.run, bench.engine.run_streamed):
        [ran] = run(Block(PROMPT, source, LONG))
        names = ran.saved or Read(bench, ran).names
        assert [row.double().sum().item() for row in names["kept"]] == [one.item() for one in names["sums"]]
        assert len(set(torch.stack(names["sums"]).tolist())) == 6
