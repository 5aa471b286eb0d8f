"""Streamed traces on a real service: outputs and saves while the block runs over two ranks, and the ways to leave."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

import interpose
from tests.e2e.service import RunningService, wait_for
from tests.e2e.test_calls import kinds, trace

PROMPT = "The Eiffel Tower is in"


def test_saves_so_far_are_those_of_the_plain_trace(model: interpose.Model) -> None:
    with model.trace(PROMPT, max_tokens=5, temperature=0.0, ignore_eos=True) as tracer:
        plain = [].save()
        for _step in tracer.iter[:]:
            plain.append(model.model.layers[2].output[0])
            last = model.logits.output.save()
    rows, noted = [], []
    with model.trace(PROMPT, max_tokens=5, temperature=0.0, ignore_eos=True, stream=True) as streamed:
        rows = [].save()
        for step in streamed.iter[:]:
            rows.append(model.model.layers[2].output[0])
            noted.append(model.logits.output.save())
            print("step", step)
    seen = []
    for out in streamed.stream():
        assert len(out.saves["rows"]) == len(noted) == len(out.token_ids)
        assert out.text.endswith(out.new_text) and len(out.new_token_ids) == 1
        seen.append(out)
    assert [out.finished for out in seen] == [False] * 4 + [True]
    assert all(torch.equal(a, b) for a, b in zip(rows, plain, strict=True))
    assert torch.equal(noted[-1], last)
    assert streamed.result == tracer.result and seen[-1].text == tracer.result.text


def test_large_values_while_it_runs(model: interpose.Model) -> None:
    """Values that travel as blobs are there with the output of their step."""
    with model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True, stream=True) as tracer:
        large = []
        for step in tracer.iter[:]:
            large.append((model.logits.output.new_ones(300_000) * step).save())
    for out in tracer.stream():
        assert [value.mean().item() for value in out.saves["large"]] == list(range(len(out.token_ids)))
    assert len(large) == 3 and tracer.usage.saved_bytes >= 3 * 1_200_000


def test_async_for_and_several_prompts(model: interpose.Model) -> None:
    with model.trace(max_tokens=3, temperature=0.0, ignore_eos=True, stream=True) as tracer:
        shared = [].save()
        with tracer.invoke(PROMPT) as first:
            for _step in tracer.iter[:]:
                token = model.samples.output.item()
                ids = [token].save()
                shared.append(token)
        with tracer.invoke("one two"):
            hidden = model.model.layers[0].output[0].save()

    async def read() -> list[interpose.StreamOutput]:
        return [out async for out in tracer.stream()]

    outs = asyncio.run(read())
    mine = [out for out in outs if out.invoke == 0]
    assert [out.saves["ids"] for out in mine] == [[token] for token in first.result.token_ids]
    assert all(torch.equal(out.saves["hidden"], hidden) for out in outs if out.invoke == 1)
    assert shared == first.result.token_ids


def test_an_error_in_the_middle(model: interpose.Model) -> None:
    seen = []
    with model.trace(PROMPT, max_tokens=9, ignore_eos=True, stream=True) as tracer:
        tokens = [].save()
        for step in tracer.iter[:]:
            tokens.append(model.samples.output.item())
            if step == 2:
                raise ValueError("boom")
    with pytest.raises(interpose.InterventionError, match="boom") as caught:
        for out in tracer.stream():
            seen.append(list(out.saves["tokens"]) == out.token_ids)
    assert seen == [True] * 3
    assert [frame.text.strip() for frame in caught.value.frames] == ['raise ValueError("boom")']


def test_leaving_early_frees_the_engine(service: RunningService, model: interpose.Model) -> None:
    with model.trace(PROMPT, max_tokens=400, ignore_eos=True, stream=True) as tracer:
        rows = []
        for _step in tracer.iter[:]:
            rows.append(model.model.layers[0].output[0].save())
            time.sleep(0.2)  # by itself it would end long after it must be gone
    for out in tracer.stream():
        if len(out.saves["rows"]) == 3:
            break
    wait_for(lambda: not any(one.running for one in service.status().models), 30)
    assert len(out.token_ids) == 3


def test_bytes_on_the_wire_grow_with_the_steps(service: RunningService, session: str) -> None:
    """256 steps that save one row each move 256 rows, with what they are wrapped in."""
    source = "rows = [].save()\nfor step in tracer.iter[:]:\n    rows.append(model.model.layers[0].output[0][-1])\n"
    streamed = trace(source, ("rows", "step"), max_tokens=256, ignore_eos=1)
    streamed.invokes[0].sampling[1].value.boolean = True
    streamed.stream = True
    events = service.submit(streamed, session)
    assert kinds(events)[-1] == "done" and "saves" not in kinds(events)
    sizes = [event.ByteSize() for event in events]
    row = 128 * 4
    assert 256 * row <= sum(sizes) <= 260 * (row + 300)
    assert max(sizes) <= row + 1000
    order = [event.WhichOneof("kind") for event in events if event.WhichOneof("kind") in ("increment", "output")]
    assert order.count("increment") == 257
    tokens = rows = 0
    for event in events:
        if event.HasField("increment"):
            rows += sum(len(patch.list.items) for patch in event.increment.patches)
            rows += sum(len(value.list.items) for value in event.increment.objects.values if value.HasField("list"))
        elif event.HasField("output"):
            tokens += len(event.output.token_ids)
            assert rows == tokens, "an output comes with what its steps saved"
    assert tokens == 256


def test_a_streamed_trace_can_be_followed_twice(service: RunningService, session: str) -> None:
    once = trace("x = model.logits.output.save()\n", ("x",), max_tokens=2)
    once.stream = True
    assert service.submit(once, session) == service.submit(once, session)


def test_streams_beside_plain_traces(model: interpose.Model) -> None:
    with model.trace(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True):
        alone = model.logits.output.save()
    with model.trace(PROMPT, max_tokens=200, temperature=0.0, ignore_eos=True, stream=True) as tracer:
        rows = []
        for _step in tracer.iter[:]:
            rows.append(model.logits.output.save())
    stream = tracer.stream()
    next(stream)
    with model.trace(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True):
        beside = model.logits.output.save()
    torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)
    stream.close()
