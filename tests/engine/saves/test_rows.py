"""What a loop in the tables leaves in lists is sent from the memory where it arrived, unless code looks at the lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from executor.graphs.buffers import Outputs
from executor.graphs.pieces import Collected
from executor.saves.rows import Rows
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import Block, LocalEngine, Ran
from tests.engine.interleave.test_loops_in_tables import check_same

PROMPT, STEPS = [5, 400, 17, 99, 256], 40
ALL = "    for layer in model.model.layers:\n        kept.append(layer.output[0].save())\n"
ONE = "    kept.append(model.model.layers[1].output[0].save())\n"
LOOP = "for step in tracer.iter[:]:\n"

# Blocks that save what a loop left; each gives what it gives without tables.
BLOCKS = {
    "a name": f"kept = []\n{LOOP}{ALL}",
    "a saved list": f"kept = [].save()\n{LOOP}{ALL.replace('.save()', '')}",
    "some are saved": f"kept = []\n{LOOP}{ONE}    kept.append(model.model.layers[2].output[0])\n",
    "nothing is saved": f"kept = []\n{LOOP}{ONE.replace('.save()', '')}",
    "lists of layers": (
        f"kept = [[], []].save()\n{LOOP}    for i, layer in enumerate(model.model.layers[:2]):\n"
        "        kept[i].append(layer.output[0])\n"
    ),
    "two names of a list": f"kept = []\nagain = [kept, kept].save()\n{LOOP}{ONE}",
    "two loops": f"kept = []\nfor step in tracer.iter[:9]:\n{ONE}for step in tracer.iter[12:]:\n{ONE}",
    "an end": f"kept = []\nfor step in tracer.iter[2:11]:\n{ONE}",
    "other shapes": f"kept = []\n{LOOP}{ONE}    kept.append(model.model.layers[1].output[0].sum())\n",
    "a reader after it": f"kept = []\n{LOOP}{ONE}total = sum(one.sum() for one in kept).save()\n",
    "a class that looks": (
        f"kept = []\nclass Looks:\n    def __init__(self):\n        self.it = None\n"
        "    def __getstate__(self):\n        return {'it': [len(kept), type(kept[-1]).__name__]}\n"
        f"looks = Looks().save()\n{LOOP}{ONE}"
    ),
}


def block(text: str, **captured: Any) -> Block:
    return Block(PROMPT, text, {"max_tokens": STEPS, "ignore_eos": True}, captured)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """Return all `Rows` that are made during a test."""
    made: list[Rows] = []
    begin = Rows.__init__
    monkeypatch.setattr(Rows, "__init__", lambda self, tensor: (made.append(self), begin(self, tensor))[1])
    return made


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_sent_is_what_the_block_itself_would_send(
    engines: tuple[LocalEngine, LocalEngine], name: str, rows: list[Rows]
) -> None:
    text = BLOCKS[name]
    expected, found = (engine.run_traces([[block(text)], [block(text)]]) for engine in engines)
    for one, other in zip(expected, found, strict=True):
        if name == "a class that looks":
            assert one.state is other.state
            assert [event.failed.message for event in events(one, "failed")] == [
                event.failed.message for event in events(other, "failed")
            ]
            continue
        check_same(one, other)
    assert bool(rows) == (name not in ("other shapes", "a reader after it", "a class that looks")), (
        "or it shows nothing"
    )


def events(ran: Ran, kind: str) -> list[pb.Event]:
    return [event for event in map(pb.Event.FromString, ran.events) if event.WhichOneof("kind") == kind]


def test_a_list_of_the_notebook_gets_what_the_loop_left(
    engines: tuple[LocalEngine, LocalEngine], rows: list[Rows]
) -> None:
    text = f"{LOOP}{ONE}"
    [one], [other] = (engine.run(block(text, kept=["before"])) for engine in engines)
    [mine], [theirs] = one.updates.values(), other.updates.values()
    assert mine[0] == theirs[0] == "before" and len(mine) == len(theirs) == STEPS + 1 and rows
    assert all(torch.equal(a, b) for a, b in zip(mine[1:], theirs[1:], strict=True))


def test_invokes_that_share_a_list_see_tensors(engines: tuple[LocalEngine, LocalEngine], rows: list[Rows]) -> None:
    blocks = [block(f"kept = []\n{LOOP}{ONE}") for _ in range(2)]
    for one, other in zip(*(engine.run(*blocks) for engine in engines), strict=True):
        check_same(one, other)
    assert not rows


def test_the_bytes_that_leave_are_those_that_arrived(
    engines: tuple[LocalEngine, LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[1]
    arrived: list[Collected] = []
    left: list[memoryview] = []
    collect, put = Outputs.collect, engine.worker.interpose_outbox.put
    monkeypatch.setattr(Outputs, "collect", lambda self, key: arrived.append(collect(self, key)) or arrived[-1])
    monkeypatch.setattr(engine.worker.interpose_outbox, "put", lambda *a: left.append(a[-1]) or put(*a))
    monkeypatch.setattr("executor.saves.encoder.INLINE_STACK_BYTES", 0)
    [ran] = engine.run(block(f"kept = []\n{LOOP}{ALL}"))
    layers = len(ran.saved["kept"]) // STEPS
    assert layers > 1 and len(ran.saved["kept"]) == layers * STEPS
    piece = arrived[0]._pieces[-1]  # of the steps after the prompt
    sizes = [data.nbytes for data in left]
    mine = left[sizes.index((STEPS - 1) * layers * 128 * 4)]
    assert np.frombuffer(mine, np.uint8).ctypes.data == piece.values.data_ptr()
