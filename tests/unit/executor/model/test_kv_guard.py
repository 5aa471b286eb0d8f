"""The check of the cache: what is cleaned, whose flags rise, and when the host learns of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from executor.model.kv_caches import Parts
from executor.model.kv_guard import CacheGuard
from tests.unit.executor.model.cleaning import BLOCKS, HEADS, LAYOUTS, SLOTS, WIDTH, Sample

ROOT = Path(__file__).parents[4]


def one_layer(value: float | None = None, block: int = 2) -> tuple[SimpleNamespace, CacheGuard]:
    cache = LAYOUTS["heads"](torch.float32)
    if value is not None:
        cache[block, 1, 0, 3, 2] = value
    layer = SimpleNamespace(kv_cache=cache, head_size=WIDTH, num_kv_heads=HEADS, kv_cache_dtype="auto")
    return layer, CacheGuard({"attn": layer, "mlp": SimpleNamespace()})


def rows(*slots: int) -> dict[str, torch.Tensor]:
    return {"attn": torch.tensor(slots)}


def owners(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def no_flags(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def test_flags_of_the_owners_of_unsound_blocks_rise() -> None:
    layer, guard = one_layer(float("nan"))
    flags = no_flags(3)
    guard.launch(rows(SLOTS, 2 * SLOTS + 5, 3 * SLOTS, -1), owners(0, 1, 2, 1), flags)
    assert flags.tolist() == [0, 1, 0] and layer.kv_cache.eq(0).all()
    guard.launch(rows(2 * SLOTS + 6), owners(1), flags)
    assert flags.tolist() == [0, 1, 0], "a flag is not lowered, and a clean block raises none"


def test_rows_without_an_owner_are_not_looked_at() -> None:
    layer, guard = one_layer(float("nan"))
    flags = no_flags(1)
    guard.launch(rows(2 * SLOTS, 5), owners(-1, 0), flags)
    assert not flags.any() and layer.kv_cache.isnan().any()


def test_a_block_is_named_once_and_not_before_its_flags_are_watched() -> None:
    _, guard = one_layer(float("nan"))
    flags = no_flags(2)
    guard.launch(rows(2 * SLOTS, 3 * SLOTS), owners(0, 1), flags)
    assert guard.poll() == frozenset()
    guard.watch(flags, [["a", "joint"], ["b"]])
    flags.zero_()  # for the next launch
    assert guard.wait(["b", "a"]) == {"a"}
    assert guard.wait(["a"]) == frozenset() and guard.poll() == {"joint"} and guard.poll() == frozenset()


def test_waiting_leaves_what_others_spoilt() -> None:
    _, guard = one_layer()
    guard.watch(torch.tensor([1], dtype=torch.int32), [["other"]])
    guard.watch(torch.tensor([0], dtype=torch.int32), [["mine"]])
    assert guard.wait(["mine"]) == frozenset() and guard.poll() == {"other"}


def test_a_cache_that_is_allocated_anew_is_the_one_that_is_looked_at() -> None:
    layer, guard = one_layer()
    guard.launch(rows(2 * SLOTS), owners(0), no_flags(1))
    layer.kv_cache = LAYOUTS["heads"](torch.float32).fill_(float("inf"))
    flags = no_flags(1)
    guard.launch(rows(2 * SLOTS), owners(0), flags)
    assert flags.tolist() == [1] and layer.kv_cache[2].eq(0).all() and layer.kv_cache[1].isinf().all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_how_a_block_lies_in_memory(name: str) -> None:
    cache = LAYOUTS[name](torch.float32)
    dim = 1 if name == "halves" else 0
    parts = Parts.of(cache, dim)
    assert parts is not None and parts.count == (2 if name == "halves" else 1)
    flat = torch.as_strided(cache, (cache.untyped_storage().nbytes() // 4,), (1,))
    cache.zero_()
    for part in range(parts.count):
        start = 5 * parts.block + part * parts.stride
        flat[start : start + parts.length] += 1
    assert cache.select(dim, 5).eq(1).all() and cache.sum() == cache.numel() // BLOCKS


def test_a_block_that_lies_in_another_way() -> None:
    assert Parts.of(torch.zeros(4, 2, 16, 8)[:, :, ::2, ::2], 0) is None
    assert not one_layer()[1].capturable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_guard_does_what_the_reference_says(dtype: torch.dtype) -> None:
    raised = 0
    for seed in range(30):
        sample = Sample(seed, dtype)
        raised += sample.check(lambda guard, of=sample: guard.launch(of.mapping, of.owners, of.flags))  # type: ignore[misc]
    assert raised > 10


def test_the_kernel_does_what_the_reference_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.executor.model.cleaning"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"compared, (\d+) flags", done.stdout)
    assert done.returncode == 0 and found, done.stderr[-3000:]
    assert int(found[1]) > 10
