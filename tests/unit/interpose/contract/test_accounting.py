"""`tracer.accounting`: what an invoke did, as the server counted it."""

from __future__ import annotations

import pytest

import interpose
from interpose.contract.errors import InterventionError, InvalidArgument
from interpose.v1 import trace_pb2 as pb
from interpose.v1 import value_pb2


def accounting(invoke: int, served: int) -> pb.Event:
    event = pb.Event()
    event.accounting.invoke = invoke
    event.accounting.locations.add(location="model.norm.output", served=served, written=1)
    event.accounting.locations.add(location="logits.output", served=served)
    event.accounting.steps, event.accounting.prompt_tokens, event.accounting.generated_tokens = 3, 5, 4
    event.accounting.dtype = value_pb2.DTYPE_BFLOAT16
    event.accounting.kv_cache_dtype = value_pb2.DTYPE_FLOAT8_E4M3FN
    event.accounting.tiers.add(tier="block", steps=1, why="line 7: print sends text in every step")
    event.accounting.tiers.add(tier="graph", steps=1)
    event.accounting.tiers.add(tier="block", steps=1)
    event.accounting.attention, event.accounting.matmul = "FLASH_ATTN", "highest"
    return event


def test_of_a_trace_with_one_prompt(service, model):
    service.script = lambda service, trace: iter([accounting(0, 7)])
    with model.trace("a") as tracer:
        model.logits.output
    assert tracer.accounting == interpose.Accounting(
        served={"model.norm.output": 7, "logits.output": 7},
        written={"model.norm.output": 1},
        steps=3,
        prompt_tokens=5,
        generated_tokens=4,
        dtype="bfloat16",
        kv_cache_dtype="float8_e4m3fn",
        attention="FLASH_ATTN",
        matmul="highest",
        tiers={"block": 2, "graph": 1},
        reasons={"line 7: print sends text in every step": 1},
    )


def test_of_several_prompts(service, model):
    service.script = lambda service, trace: iter([accounting(1, 2), accounting(0, 9)])
    with model.trace() as tracer:
        with tracer.invoke("a") as first:
            model.logits.output
        with tracer.invoke("b") as second:
            model.logits.output
    assert first.accounting.served["logits.output"] == 9
    assert second.accounting.served["logits.output"] == 2
    with pytest.raises(InvalidArgument, match="one.accounting"):
        tracer.accounting


def test_of_a_failed_one(service, model):
    failed = pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_INTERVENTION, message="boom"))
    service.script = lambda service, trace: iter([failed, accounting(0, 1)])
    with pytest.raises(InterventionError), model.trace("a") as tracer:
        model.logits.output
    assert tracer.accounting.served["logits.output"] == 1


def test_before_the_trace_has_run(model):
    with pytest.raises(InvalidArgument, match="after the block"):
        model.trace("a").accounting
