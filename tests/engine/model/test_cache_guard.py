"""Which blocks of the cache are looked at, and which of them are cleared: as the engine says where tokens' keys went."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.core.request import Span
from executor.model import kv_guard as cache_guard
from executor.model.kv_guard import CacheGuard

SLOTS = 16
NAN = float("nan")


class Bench:
    """One layer with four blocks, and the places of a step with two requests: one in blocks 2 and 3, the other in block 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: torch.Tensor, **layer: Any) -> None:
        self.cache = cache
        self.layer = SimpleNamespace(kv_cache=cache, head_size=4, num_kv_heads=2, kv_cache_dtype="auto", **layer)
        # What the backend notes beside them is its own affair.
        self.context = SimpleNamespace(
            attn_metadata={"attn": object()}, slot_mapping={"attn": torch.tensor([46, 47, 48, 20, -1, -1])}
        )
        monkeypatch.setattr(cache_guard, "get_forward_context", lambda: self.context)
        self.first, self.second = Span(0, 0, 3), Span(1, 3, 4)

    def clean(self, *spans: Span) -> list[Span]:
        guard = CacheGuard({"attn": self.layer})
        guard.check({str(i): [span] for i, span in enumerate(spans)})
        found = guard.poll()
        assert guard.poll() == frozenset(), "a block is named once"
        return [span for i, span in enumerate(spans) if str(i) in found]


def heads(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A cache of heads: [blocks, 2, heads, tokens, width]."""
    return torch.ones(4, 2, 2, SLOTS, 4).to(dtype)


def halves() -> torch.Tensor:
    """A cache that has the keys of all blocks before the values: [2, blocks, tokens, heads, width]."""
    return torch.ones(2, 4, SLOTS, 2, 4)


def latent() -> torch.Tensor:
    """One of latent attention: [blocks, tokens, width]."""
    return torch.ones(4, SLOTS, 12)


def packed() -> torch.Tensor:
    """DeepSeek's packed keys: [blocks, tokens, bytes], numbers of eight bits, then their scales, then numbers of sixteen."""
    cache = torch.zeros(4, SLOTS, 12, dtype=torch.uint8)
    cache[..., 4:8].view(torch.float32).fill_(-1.4e-2)
    cache[..., 8:].view(torch.bfloat16).fill_(float.fromhex("-0x1.fep0"))  # as a number of eight bits each half is NaN
    return cache


@pytest.mark.parametrize(("make", "dim"), [(heads, 0), (halves, 1), (latent, 0)])
@pytest.mark.parametrize("block", [0, 1, 2, 3])
def test_what_is_found_where(monkeypatch: pytest.MonkeyPatch, make: Any, dim: int, block: int) -> None:
    bench = Bench(monkeypatch, make())
    part = bench.cache.select(dim, block)
    part[(0,) * part.dim()] = NAN
    found = bench.clean(bench.first, bench.second)
    assert found == {1: [bench.second], 2: [bench.first], 3: [bench.first]}.get(block, [])
    if block == 0:
        assert bench.cache.isnan().sum() == 1, "nobody's in this step"
        return
    for one in range(4):
        assert bench.cache.select(dim, one).eq(0 if one == block else 1).all()


def test_padding_and_other_requests_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, heads())
    bench.cache[1] = NAN
    assert bench.clean(bench.first) == []
    assert bench.clean(Span(2, 4, 6)) == []
    assert bench.cache[1].isnan().all()


def test_a_step_without_attention_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, heads() * NAN)
    bench.context.attn_metadata = None
    assert bench.clean(bench.first) == []


def test_where_nobody_says_what_was_written_nothing_is_taken_for_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, heads())
    bench.context.slot_mapping = {}
    assert bench.clean(bench.first) == [bench.first]


@pytest.mark.parametrize(
    ("dtype", "value", "sound"),
    [
        (torch.float32, 1e17, True),
        (torch.float32, 1e19, False),
        (torch.bfloat16, 1e17, True),
        (torch.float16, 4000.0, True),
        (torch.float16, 6e4, False),  # finite, and what a layer makes of it is not
    ],
)
def test_what_is_too_large(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float, sound: bool) -> None:
    bench = Bench(monkeypatch, heads(dtype))
    bench.cache[3, 0, 0, 0, 0] = value
    assert bench.clean(bench.first) == ([] if sound else [bench.first])


def test_numbers_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, heads(torch.float8_e4m3fn).view(torch.uint8))
    bench.layer.kv_cache_dtype = "fp8"
    assert bench.clean(bench.first) == []
    bench.cache[2, 0, 0, 0, 0] = 0x7F  # NaN
    assert bench.clean(bench.first) == [bench.first]


@pytest.mark.parametrize("kind", ["fp8_ds_mla", "fp8", "auto", None])
def test_packed_keys_are_not_taken_for_numbers(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """The layer's own width says, under any name, that there is more than the numbers."""
    bench = Bench(monkeypatch, packed())
    bench.layer.kv_cache_dtype = kind
    if kind is None:
        del bench.layer.kv_cache_dtype
    before = bench.cache.clone()
    assert before.view(torch.float8_e4m3fn).isnan().any() or before.eq(0x7F).any() or before.eq(0xFF).any()
    assert bench.clean(bench.first) == []
    assert torch.equal(bench.cache, before), "nothing of it was cleared"
    why = CacheGuard({"attn": bench.layer}).why_not_looked_at
    assert "attn keeps its keys packed" in why and (kind or "uint8") in why


@pytest.mark.parametrize("make", [heads, halves, latent])
def test_plain_keys_are_looked_at(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    bench = Bench(monkeypatch, make())
    assert CacheGuard({"attn": bench.layer}).why_not_looked_at == ""
    bench.layer.kv_cache_dtype = "int8_per_token_head"
    assert "int8_per_token_head" in CacheGuard({"attn": bench.layer}).why_not_looked_at


def test_scales_beside_the_numbers_of_a_block_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wider = torch.zeros(4, 2, 2, SLOTS, 4 + 1, dtype=torch.uint8)
    bench = Bench(monkeypatch, wider)
    bench.layer.kv_cache_dtype = "fp8"
    assert CacheGuard({"attn": bench.layer}).why_not_looked_at
