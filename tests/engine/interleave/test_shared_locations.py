"""Blocks at one location are served at once: each gives what it gives when each is served by itself, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.interleave.serving import Serving
from executor.model.batched import BatchValue
from tests.engine.conftest import Bench
from tests.engine.harness import Block, Ran

TOKENS = 4
END = """\
    seen.append(model.logits.output.save())
tokens = tracer.result.token_ids.save()
"""
LOOP = "seen = []\nfor step in tracer.iter[:]:\n"
BLOCKS = {
    "reads": LOOP + "    seen.append({layer}.output.save())\n" + END,
    "reads a part": LOOP + "    seen.append({layer}.mlp.output[-1].save())\n" + END,
    "changes in place": LOOP + "    {layer}.mlp.output[:, ::3] += 0.5 + step\n" + END,
    "changes what torch does not count": LOOP + "    {layer}.mlp.output.numpy()[:, 3] = 2\n" + END,
    "assigns": LOOP + "    {layer}.mlp.output = {layer}.mlp.output * 0.5\n" + END,
    "assigns twice": LOOP + "    {layer}.mlp.output = {layer}.mlp.output * 2\n    {layer}.mlp.output[:] -= 1\n" + END,
    "assigns an input": LOOP + "    {layer}.mlp.input = {layer}.mlp.input + 1\n" + END,
    "changes an input": LOOP + "    {layer}.mlp.input[:, 1] = 4\n" + END,
    "changes the stream": LOOP + "    model.blocks[2].resid_post[:, 5:9] += 1\n" + END,
    "keeps a tuple": LOOP + """\
    kept = {layer}.mlp.inputs
    later = {after}.output
    seen.append(kept[0][0].save())
""" + END,
    "applies a module": LOOP + "    seen.append({layer}.mlp(model.blocks[1].resid_post).save())\n" + END,
    "changes the logits": LOOP + "    model.logits.output[:, 7] += 3\n" + END,
    "chooses tokens": LOOP + "    model.samples.output[:] = 9 + step\ntokens = tracer.result.token_ids.save()\n",
    "fails": LOOP + "    {layer}.mlp.output = 1 / (2 - step)\n" + END,
    "does not fit": LOOP + "    {layer}.mlp.output.resize_(7, 3)\n" + END,
    "is stale": LOOP + "    h = {layer}.mlp.output\n    model.logits.output\n    h[:] = 0\n" + END,
    "stops": LOOP + "    {layer}.mlp.output\n    if step == 1:\n        tracer.stop()\n" + END,
    "ends early": "seen = [{layer}.mlp.output.save()]\n",
    "draws": LOOP + "    torch.manual_seed(step)\n    {layer}.mlp.output[:] += torch.rand(1)\n" + END,
    "leaves a dtype": LOOP + """\
    {layer}.mlp.output
    torch.set_default_dtype(torch.float64)
    seen.append(torch.ones(1).save())
""" + END,
    "leaves inference mode": LOOP + "    torch.inference_mode().__enter__()\n    seen.append({layer}.mlp.output.save())\n" + END,
    "wants gradients": LOOP + """\
    h = {layer}.mlp.output.requires_grad_()
    with torch.enable_grad():
        h.sum().backward()
    seen.append(h.grad.save())
""" + END,
}  # fmt: skip


def prompt_of(index: int) -> list[int]:
    return [5 + (7 * index + 3 * j) % 400 for j in range(2 + index % 4)]


def blocks_of(bench: Bench) -> list[Block]:
    names = {"layer": _name(bench, 2), "after": _name(bench, 3)}
    sampling = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 3}
    return [Block(prompt_of(i), text.format(**names), sampling) for i, text in enumerate(BLOCKS.values())]


def _name(bench: Bench, layer: int) -> str:
    return f"model.transformer.h[{layer}]" if bench.arch == "gpt2" else f"model.model.layers[{layer}]"


class Counter:
    """Counts the locations that several blocks were served at once, and lets them be so or not."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at_once = True
        self.counted = 0
        real = Serving.shared

        def shared(serving: Serving, *args: Any) -> BatchValue | None:
            found = real(serving, *args) if self.at_once else None
            self.counted += found is not None
            return found

        patch.setattr(Serving, "shared", shared)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def same(one: Any, other: Any) -> bool:
    """Return whether two saved values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*two) for two in zip(one, other, strict=True))
    return bool(one == other)


def check_equal(names: list[str], first: list[Ran], second: list[Ran]) -> None:
    for name, one, other in zip(names, first, second, strict=True):
        assert one.token_ids == other.token_ids, name
        assert one.state == other.state, name
        assert one.saved.keys() == other.saved.keys(), name
        for key, value in one.saved.items():
            assert same(value, other.saved[key]), f"{name}: {key}"
        assert (one.failure is None) == (other.failure is None), name
        if one.failure is not None and other.failure is not None:
            assert (one.failure.code, one.failure.message, one.failure.location) == (
                other.failure.code,
                other.failure.message,
                other.failure.location,
            )
        if one.accounting is not None and other.accounting is not None:
            assert list(one.accounting.locations) == list(other.accounting.locations), name


@pytest.mark.parametrize("beside", [(), ([9] * 3, [11] * 5)], ids=["alone", "beside plain requests"])
def test_traces_of_all_kinds(bench: Bench, counter: Counter, beside: tuple[list[int], ...]) -> None:
    blocks = blocks_of(bench)
    at_once = bench.engine.run_traces([[block] for block in blocks], plain=beside)
    assert counter.counted >= 3 * TOKENS
    counter.at_once = False
    one_by_one = bench.engine.run_traces([[block] for block in blocks], plain=beside)
    check_equal([*BLOCKS, *map(str, beside)], at_once, one_by_one)
    failed = {name: ran.failure for name, ran in zip(BLOCKS, at_once, strict=False) if ran.failure is not None}
    assert failed.keys() == {"fails", "does not fit", "is stale"}, failed


def test_invokes_of_one_trace(bench: Bench, counter: Counter) -> None:
    blocks = blocks_of(bench)
    at_once = bench.engine.run(*blocks)
    assert counter.counted >= 3 * TOKENS
    counter.at_once = False
    check_equal(list(BLOCKS), at_once, bench.engine.run(*blocks))


def test_invokes_that_have_a_list_in_common_are_served_one_by_one(bench: Bench, counter: Counter) -> None:
    layer = _name(bench, 2)
    given: dict[str, Any] = {"met": []}
    first = f"h = {layer}.mlp.output\nmet.append(h)\nlogits = model.logits.output.save()\n"
    second = f"h = {layer}.mlp.output\nseen = torch.equal(met[0], h)\nseen.save()\nmet[0][:] = 0\n"
    prompt = prompt_of(5)
    ran = bench.engine.run(Block(prompt, first, captured=given), Block(prompt, second, captured=given))
    assert counter.counted == 0
    assert ran[1].saved["seen"] is True
    assert ran[0].failure is not None
    assert "changed in place after" in ran[0].failure.message


def test_saved_values_of_many_requests_hold_their_own_rows(bench: Bench, counter: Counter) -> None:
    layer = _name(bench, 1)
    text = f"h = {layer}.mlp.output\nsize = h.untyped_storage().nbytes()\nrows = h.shape[0]\nsize.save(), rows.save()\n"
    ran = bench.engine.run_traces([[Block(prompt_of(i), text)] for i in range(6)])
    assert counter.counted
    width = bench.oracle.model.config.hidden_size
    assert [one.saved["size"] for one in ran] == [one.saved["rows"] * width * 4 for one in ran]
