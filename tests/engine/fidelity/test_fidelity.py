"""Every value a block reads, and every edit it makes, equals transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block
from tests.oracle import Edit, difference, locations

PROMPTS = [[5, 400, 17, 99, 256, 31, 8], [3, 77], [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19], [222]]
STEPS = 9
TOLERANCE = 1e-4


def read_everything(bench: Bench, steps: int) -> str:
    lines = ["values = []", f"for step in tracer.iter[:{steps}]:"]
    for at in locations(bench.checkpoint):
        kind = "output" if at.kind == "output" else "input"
        lines.append(f"    values.append({expression(at.path)}.{kind}.save())")
    return "\n".join(lines)


def check_everything(bench: Bench, prompt: list[int], values: list[Any], tokens: list[int]) -> None:
    truth = bench.oracle.run(prompt, STEPS)
    assert tokens == truth.tokens
    listed = locations(bench.checkpoint)
    assert len(values) == len(listed) * STEPS
    for i, value in enumerate(values):
        at, step = listed[i % len(listed)], i // len(listed)
        error = difference(value, truth.value(at.path, at.kind, step))
        assert error <= TOLERANCE, f"{at} in step {step} is off by {error}"


def test_every_location_in_prefill_and_decode(bench: Bench) -> None:
    for prompt in PROMPTS:
        [ran] = bench.engine.run(
            Block(prompt, read_everything(bench, STEPS), {"max_tokens": STEPS, "ignore_eos": True})
        )
        assert ran.failure is None, ran.failure
        check_everything(bench, prompt, ran.saved["values"], ran.token_ids)


def test_eight_at_once_each_gets_its_own(bench: Bench) -> None:
    prompts = [*PROMPTS, [9, 9, 9], [100, 200, 300, 400], [44, 1, 7], [350, 20, 6, 5, 4, 3]]
    plain = [[8, 8, 1], [70, 7, 2, 250]]
    alone = [bench.engine.plain(prompt).token_ids for prompt in plain]
    source = read_everything(bench, STEPS)
    traces = [[Block(prompt, source, {"max_tokens": STEPS, "ignore_eos": True})] for prompt in prompts]
    rans = bench.engine.run_traces(traces, plain=tuple(plain))
    for prompt, ran in zip(prompts, rans, strict=False):
        assert ran.failure is None, ran.failure
        check_everything(bench, prompt, ran.saved["values"], ran.token_ids)
    assert [ran.token_ids for ran in rans[len(prompts) :]] == alone


def edit_cases(bench: Bench) -> list[tuple[str, str, str, Callable[[Any], Any]]]:
    """(path, kind, the statement in a block, the same for the oracle); `at` is the location's expression."""
    block, attn = bench.block(1), ".attn" if bench.arch == "gpt2" else ".self_attn"
    column = block + attn + (".c_attn" if bench.arch == "gpt2" else ".qkv_proj")
    row = block + (".mlp.c_proj" if bench.arch == "gpt2" else ".mlp.down_proj")
    embed = "transformer.wte" if bench.arch == "gpt2" else "model.embed_tokens"

    def first(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda v: (f(v[0]), *v[1:]) if isinstance(v, tuple) else f(v)

    def set_last(v: Any) -> Any:
        v[-1] = 2.0
        return v

    return [
        (block + ".mlp", "output", "{at}[:] = 0", lambda v: v * 0),
        (block + ".mlp", "output", "{at} = {at} * 0", lambda v: v * 0),
        (block + attn, "output", "{at} += vector", lambda v: v + torch.linspace(-1, 1, v.shape[-1])),
        (block, "output", "{first}[-1] = 2.0", first(set_last)),
        (block, "output", "{first} += vector", first(lambda v: v + torch.linspace(-1, 1, v.shape[-1]))),
        (column, "output", "{at}[0][:, ::3] = 0.5", first(lambda v: _strided(v))),
        (row, "input", "{at} = {at}.flip(-1)", lambda v: v.flip(-1)),
        (row, "output", "{at}[0] = {at}[0].clamp(-0.1, 0.1)", first(lambda v: v.clamp(-0.1, 0.1))),
        (embed, "output", "{at}[:, :7] *= 3", lambda v: _scaled(v)),
        ("logits", "output", "{at}[:, 77] = 1e4", lambda v: _forced(v)),
    ]


def _strided(v: torch.Tensor) -> torch.Tensor:
    v[:, ::3] = 0.5
    return v


def _scaled(v: torch.Tensor) -> torch.Tensor:
    v[:, :7] *= 3
    return v


def _forced(v: torch.Tensor) -> torch.Tensor:
    v[:, 77] = 1e4
    return v


@pytest.mark.parametrize("case", range(10))
@pytest.mark.parametrize("beside", [0, 3])
def test_an_edit_does_what_the_same_edit_does_in_transformers(bench: Bench, case: int, beside: int) -> None:
    path, kind, statement, apply = edit_cases(bench)[case]
    at = f"{expression(path)}.{kind}"
    is_pair = bench.arch == "llama" and path == bench.block(1)
    line = statement.format(at=at, first=f"{at}[0]" if is_pair else at)
    source = f"logits = []\nfor step in tracer.iter[:]:\n    {line}\n    logits.append(model.logits.output.save())\n"
    hidden = bench.oracle.config.hidden_size
    prompt = PROMPTS[0]
    block = Block(prompt, source, {"max_tokens": 5, "ignore_eos": True}, {"vector": torch.linspace(-1, 1, hidden)})
    others = [[Block(p, "x = 1", {"max_tokens": 6})] for p in PROMPTS[1 : beside + 1]]
    rans = bench.engine.run_traces([*others, [block]], plain=tuple(PROMPTS[1 : beside + 1]))
    ran = rans[len(others)]
    assert ran.failure is None, ran.failure
    truth = bench.oracle.run(prompt, 5, [Edit(path, kind, apply)])
    untouched = bench.oracle.run(prompt, 5)
    assert difference(truth.logits[0], untouched.logits[0]) > 1e-3, "the edit must show"
    assert ran.token_ids == truth.tokens
    for step, logits in enumerate(ran.saved["logits"]):
        expected = truth.logits[step]
        if path == "logits":
            assert int(logits.argmax()) == 77
        else:
            assert difference(logits, expected) <= TOLERANCE
    for other, plain in zip(PROMPTS[1 : beside + 1], rans[len(others) + 1 :], strict=True):
        assert plain.token_ids == bench.engine.plain(other).token_ids


def test_a_value_from_another_invoke_patches_this_one(bench: Bench) -> None:
    path = bench.block(1) + ".mlp"
    at = f"{expression(path)}.output"
    source, target = PROMPTS[2], PROMPTS[0]
    rans = bench.engine.run(
        Block(source, f"h = {at}[-1]"),
        Block(target, f"{at}[-1] = h\nlogits = model.logits.output.save()", after=(0,)),
    )
    donor = bench.oracle.run(source).value(path)[-1]

    def patch(value: torch.Tensor) -> torch.Tensor:
        value[-1] = donor
        return value

    truth = bench.oracle.run(target, 1, [Edit(path, "output", patch)])
    assert difference(rans[1].saved["logits"], truth.logits[0]) <= TOLERANCE
    assert difference(truth.logits[0], bench.oracle.run(target).logits[0]) > 1e-3


def test_forced_samples_are_what_the_model_goes_on_with(bench: Bench) -> None:
    source = "for step in tracer.iter[:]:\n    model.samples.output[:] = 40 + step\n"
    [ran] = bench.engine.run(Block(PROMPTS[0], source, {"max_tokens": 4, "ignore_eos": True}))
    assert ran.token_ids == [40, 41, 42, 43]
    truth = bench.oracle.run(PROMPTS[0], 4, force=[40, 41, 42])
    body = "    out.append(model.logits.output.save())\n    model.samples.output[:] = 40 + s"
    source = f"out = []\nfor s in tracer.iter[:]:\n{body}"
    [ran] = bench.engine.run(Block(PROMPTS[0], source, {"max_tokens": 4, "ignore_eos": True}))
    for step, logits in enumerate(ran.saved["out"]):
        assert difference(logits, truth.logits[step]) <= TOLERANCE
