"""`tracer.cache()` records what the model goes on with, in every step, as transformers has it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import interpose
from executor.core.ended import Ended
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block
from tests.engine.notebook import notebook
from tests.oracle import Edit, difference, locations

ONE = [5, 400, 17, 99, 256]
TWO = [3, 77]
LONG = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}


def layers(bench: Bench, model: Any) -> Any:
    return model.transformer.h if bench.arch == "gpt2" else model.model.layers


def test_all_modules_in_every_step(bench: Bench) -> None:
    """Everything that the oracle knows is there and equal, in the prefill and in each later step."""
    model = notebook(bench.engine)
    with model.trace(ONE, **LONG) as tracer:
        cache = tracer.cache(include_inputs=True)
    truth = bench.oracle.run(ONE, 3)
    compared = 0
    for location in locations(bench.checkpoint):
        if location.path not in cache or location.kind == "input":
            continue
        assert len(cache[location.path]) == 3
        for step in range(3):
            found = cache[location.path].output[step]
            assert difference(found, truth.value(location.path, "output", step)) <= 1e-4, (location, step)
        compared += 1
    assert compared > 20
    assert cache.refused == {} and {"logits", "samples"} <= set(cache.keys())
    args, kwargs = cache[f"{bench.block(1)}.mlp"].inputs[0]
    assert cache[f"{bench.block(1)}.mlp"].input[0].shape == (5, args[0].shape[-1]) and kwargs == {}
    at = layers(bench, cache)[2].mlp
    assert torch.equal(at.output[1], cache[f"{bench.block(2)}.mlp"].output[1])


def test_named_modules_of_each_prompt_after_their_changes(bench: Bench) -> None:
    """What a block did is in what it has recorded, its own rows only, though the block has ended meanwhile."""
    model = notebook(bench.engine)
    first, second = layers(bench, model)[1].mlp, layers(bench, model)[2].mlp
    path = first.path
    with model.trace(**LONG) as tracer:
        with tracer.invoke(ONE) as one:
            kept = tracer.cache(modules=[second, path, "logits"], dtype=torch.float64)
            first.output[:] = 0.25
        with tracer.invoke(TWO, max_tokens=1):
            other = tracer.cache([first])
        with tracer.invoke(TWO):
            pass
    edits = [Edit(first.path, "output", lambda value: value * 0 + 0.25, steps={0})]
    truth = bench.oracle.run(ONE, 3, edits)
    assert kept.keys() == [first.path, second.path, "logits"]
    assert kept[second.path].output[0].dtype == torch.float64
    assert (kept[first.path].output[0] == 0.25).all()
    for step in range(3):
        assert difference(kept[second.path].output[step], truth.value(second.path, "output", step)) <= 1e-4
        assert difference(kept["logits"].output[step], truth.logits[step]) <= 1e-4
    assert difference(other[first.path].output, bench.oracle.run(TWO).value(first.path)) <= 1e-4
    assert len(other[first.path]) == 1 and other.keys() == [first.path]
    assert one.accounting.served[f"{second.path}.output"] == 3


def test_from_where_it_was_declared(bench: Bench) -> None:
    model = notebook(bench.engine)
    early, late = layers(bench, model)[0].mlp, layers(bench, model)[2].mlp
    with model.trace(ONE, **LONG) as tracer:
        early.output
        cache = tracer.cache(modules=[early, late])
        late.output
        unreached = len(cache).save()
        for _step in tracer.iter[1]:
            counts = [len(cache[late.path]), early.path in cache].save()
        result = tracer.result
        at_the_end = [len(cache[early.path]), len(cache[late.path])].save()
    assert unreached == 0 and counts == [1, False] and at_the_end == [2, 3]
    truth = bench.oracle.run(ONE, 3)
    for step in range(2):
        assert difference(cache[early.path].output[step], truth.value(early.path, "output", step + 1)) <= 1e-4


def test_the_rows_of_all_prompts(bench: Bench) -> None:
    model = notebook(bench.engine)
    mlp = layers(bench, model)[1].mlp
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(ONE):
            pass
        with tracer.invoke(TWO):
            mlp.output[:] = 0
        with tracer.invoke():
            cache = tracer.cache([mlp])
    own = bench.oracle.run(ONE).value(mlp.path)
    expected = torch.cat([own, torch.zeros_like(own[:2])])
    assert difference(cache[mlp.path].output, expected) <= 1e-4


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("tracer.cache(modules=['nothing.here'])", "takes modules or their paths"),
        ("tracer.cache(modules='logits')", "a list of modules"),
        ("tracer.cache(modules=[model.blocks[1].attn])", "canonical value"),
        ("tracer.cache(modules=[model.lm_head])", "never called|uses its weights"),
        ("tracer.cache(include_output=False)", "records nothing"),
        ("tracer.cache(dtype='float32')", "a torch dtype"),
        ("tracer.cache(device='meta')", "'cpu', 'cuda' or None"),
        ("tracer.cache(device=3.5)", "a torch device or None"),
        ("tracer.cache(rows=3)", "unexpected keyword"),
    ],
)
def test_what_cannot_be_recorded(bench: Bench, call: str, why: str) -> None:
    [ran] = bench.engine.run(Block(ONE, f"cache = {call}"))
    assert ran.failure is not None and re.search(why, ran.failure.message), ran.failure.message
    assert ran.failure.frames[-1].line == 1


def test_a_type_that_values_cannot_become(bench: Bench) -> None:
    """It shows in the middle of the model's step, and is the block's error: named modules fail it, of all they are left out."""
    path, other = f"{bench.block(1)}.mlp", Block(TWO, "logits = model.logits.output.save()")
    named, beside = bench.engine.run(Block(ONE, f"x = 1\ntracer.cache(modules=['{path}'], dtype=torch.quint8)"), other)
    assert named.failure is not None and named.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert "cannot be recorded" in named.failure.message and named.failure.frames[-1].line == 2
    assert difference(beside.saved["logits"], bench.oracle.run(TWO).logits[0]) <= 1e-4
    [every] = bench.engine.run(Block(ONE, "cache = tracer.cache(dtype=torch.quint8)"))
    assert every.failure is None and not every.saved["cache"].entries and path in every.saved["cache"].refused


def test_more_than_a_trace_may_save(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails while it runs, at the line that asked for it, and the prompt beside it does not notice."""
    model = notebook(bench.engine)
    monkeypatch.setattr(bench.engine.interleaver._recorders, "_limit", 20_000)
    with pytest.raises(interpose.QuotaExceeded, match=r"tracer\.cache\(\) holds more") as caught:
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(ONE * 4):
                cache = tracer.cache()
            with tracer.invoke(TWO):
                logits = model.logits.output.save()
    assert caught.value.frames[-1].text.strip() == "cache = tracer.cache()"
    assert difference(logits, bench.oracle.run(TWO).logits[0]) <= 1e-4


def test_a_request_that_still_records_is_not_given_up(bench: Bench) -> None:
    ended: list[Ended] = []
    take = bench.engine.interleaver.take_ended
    bench.engine.interleaver.take_ended = lambda: ended.extend(take().values()) or {}
    try:
        bench.engine.run(Block(ONE, "cache = tracer.cache()", {"max_tokens": 3, "ignore_eos": True}))
    finally:
        bench.engine.interleaver.take_ended = take
    assert not ended


def test_a_streamed_trace_has_none(bench: Bench) -> None:
    [ran] = bench.engine.run_streamed(Block(ONE, "cache = tracer.cache()"))
    assert ran.failure is not None and ran.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert "append the values to a list" in ran.failure.message
