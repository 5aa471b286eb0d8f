"""In a model whose cache cannot be looked at blocks read everything and change the logits and the samples only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from executor.model.kv_guard import CacheGuard
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block
from tests.oracle import difference

PROMPT = [5, 400, 17, 99, 256]


@pytest.fixture
def packed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The engine, which takes its cache for one of packed keys."""
    layer = SimpleNamespace(
        kv_cache=torch.zeros(4, 16, 656, dtype=torch.uint8), kv_cache_dtype="fp8_ds_mla", head_size=576
    )
    why = CacheGuard({"model.layers.0.self_attn.attn": layer}).why_not_looked_at
    monkeypatch.setitem(vars(bench.engine.interleaver._cache), "why_not_looked_at", why)
    return bench


def test_everything_is_read(packed: Bench) -> None:
    path = f"{packed.block(1)}.mlp"
    [ran] = packed.engine.run(Block(PROMPT, f"x = {expression(path)}.output.save()"))
    assert ran.failure is None, ran.failure
    assert difference(ran.saved["x"], packed.oracle.run(PROMPT).value(path)) <= 1e-4


@pytest.mark.parametrize(
    "change",
    [
        "{mlp}.output = {mlp}.output * 2",
        "{mlp}.output[:] = 0",
        "{mlp}.output.data.zero_()",
        "{mlp}.input[-1] = 1",
        "model.blocks[1].attn.z[:, 0] = 0",
        "model.blocks[1].resid_post[-1] += 1",
        "model.blocks[1].resid_post = model.blocks[1].resid_post * 2",
        "{block}.output = {block}.output",
        "{mlp}.skip(torch.zeros({rows}, 128))",
    ],
)
def test_no_module_is_changed(packed: Bench, change: str) -> None:
    block = expression(packed.block(1))
    source = change.format(mlp=f"{block}.mlp", block=block, rows=len(PROMPT)) + "\nlogits = model.logits.output.save()"
    untouched = packed.engine.plain(PROMPT, max_tokens=3).token_ids
    rans = packed.engine.run(Block(PROMPT, source, {"max_tokens": 3}), plain=(PROMPT,))
    assert rans[0].failure is not None
    assert (
        "cannot be changed: model.layers.0.self_attn.attn keeps its keys packed (fp8_ds_mla)" in rans[0].failure.message
    )
    assert rans[1].token_ids[:3] == untouched


def test_logits_and_samples_are_changed(packed: Bench) -> None:
    source = "model.logits.output[:, 77] = 1e4\nmodel.samples.output[:] = 78"
    [ran] = packed.engine.run(Block(PROMPT, source, {"max_tokens": 2, "ignore_eos": True}))
    assert ran.failure is None, ran.failure
    assert ran.token_ids[0] == 78
