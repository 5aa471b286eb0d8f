"""A change that does not fit is an error, also if the block catches it and assigns again: the model has gone on."""

from __future__ import annotations

from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block, check_failed

PROMPT = [5, 400, 17, 99, 256]
AGAIN = """\
model.samples.output = torch.tensor([[-1]])
try:
    tracer.result
except Exception:
    model.samples.output = torch.tensor([[7]])
"""
ONCE = """\
model.samples.output = torch.tensor([[-1]])
try:
    tracer.result
except Exception as error:
    said = str(error).save()
"""


def test_a_second_assignment_is_refused_and_not_lost(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, AGAIN, {"max_tokens": 2, "ignore_eos": True}))
    check_failed(ran, pb.ERROR_CODE_OUT_OF_ORDER, "had already passed", 5)


def test_a_block_may_catch_the_error(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, ONCE, {"max_tokens": 2, "ignore_eos": True}))
    assert ran.failure is None
    assert "the token -1" in ran.saved["said"]
    assert ran.token_ids == bench.engine.plain(PROMPT, max_tokens=2, ignore_eos=True).token_ids
