"""The check of the cache on a GPU: the kernel against the reference, in a captured graph, and flags that come without a wait."""

from __future__ import annotations

import pytest
import torch

from executor.model.kv_guard import CacheGuard
from tests.unit.executor.model.cleaning import LAYOUTS, SLOTS, Sample
from tests.unit.executor.model.test_kv_guard import one_layer

GPU = torch.device("cuda")
KINDS = [
    (torch.float32, "auto"),
    (torch.bfloat16, "auto"),
    (torch.float16, "auto"),
    (torch.float8_e4m3fn, "fp8"),
    (torch.float8_e4m3fn, "fp8_e4m3"),
    (torch.float8_e5m2, "fp8_e5m2"),
]


@pytest.mark.parametrize(("dtype", "kind"), KINDS, ids=str)
def test_the_kernel_does_what_the_reference_does(dtype: torch.dtype, kind: str) -> None:
    raised = 0
    for seed in range(40):
        sample = Sample(seed, dtype, kind, GPU)
        raised += sample.check(lambda guard, of=sample: guard.launch(of.mapping, of.owners, of.flags))  # type: ignore[misc]
    assert raised > 10


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_captured_check_reads_the_rows_of_each_replay(name: str) -> None:
    cache = LAYOUTS[name](torch.bfloat16)
    cache = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=GPU).zero_()
    layer, _ = one_layer()
    layer.kv_cache, layer.head_size = cache, 12 if name == "latent" else layer.head_size
    guard = CacheGuard({"attn": layer})
    assert guard.capturable
    slots = torch.full((4,), -1, dtype=torch.int64, device=GPU)
    owners = torch.full((4,), -1, dtype=torch.int32, device=GPU)
    flags = torch.zeros(4, dtype=torch.int32, device=GPU)
    guard.prepare({"attn": slots})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flags.zero_()
        guard.launch({"attn": slots[:3]}, owners[:3], flags)
    blocks = 1 if name == "halves" else 0
    for block in (2, 5, 7):
        slots[:2] = torch.tensor([block * SLOTS + 3, 9 * SLOTS])
        owners[:2] = torch.tensor([1, 0])
        cache.fill_(1.0).select(blocks, block).fill_(float("nan"))
        graph.replay()
        guard.watch(flags, [["a"], ["b"], [], []])
        assert guard.wait(["a", "b"]) == {"b"}
        assert cache.select(blocks, block).eq(0).all() and cache.select(blocks, 9).eq(1).all()
    owners.fill_(-1)
    cache.fill_(float("nan"))
    graph.replay()
    guard.watch(flags, [["a"], ["b"], [], []])
    assert guard.wait(["a", "b"]) == frozenset() and cache.isnan().all()


def test_the_host_does_not_wait() -> None:
    layer, _ = one_layer(float("nan"))
    layer.kv_cache = layer.kv_cache.to(GPU)
    guard = CacheGuard({"attn": layer})
    slots = {"attn": torch.tensor([2 * SLOTS], device=GPU)}
    guard.prepare(slots)
    owners, flags = torch.zeros(1, dtype=torch.int32, device=GPU), torch.zeros(1, dtype=torch.int32, device=GPU)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second: the steps before it
    guard.launch(slots, owners, flags)
    guard.watch(flags, [["a"]])
    assert guard.poll() == frozenset(), "the device is not that far"
    assert guard.wait(["a"]) == {"a"} and layer.kv_cache.eq(0).all()
