"""Random caches in the layouts of vLLM's attention backends, and the two ways to clean them, side by side.

As a program it runs the kernel in Triton's interpreter, which a process chooses before it imports Triton. The interpreter has no
numbers of eight bits; `tests/gpu/test_cache_guard.py` has them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import torch

from executor.model.kv_caches import GuardedCache
from executor.model.kv_guard import CacheGuard

SLOTS, HEADS, WIDTH, BLOCKS = 16, 2, 4, 12
CPU = torch.device("cpu")
Layout = Callable[[torch.dtype], torch.Tensor]


def _heads(dtype: torch.dtype) -> torch.Tensor:  # [blocks, 2, heads, tokens, width]
    return torch.zeros(BLOCKS, 2, HEADS, SLOTS, WIDTH, dtype=dtype)


def _halves(dtype: torch.dtype) -> torch.Tensor:  # [2, blocks, tokens, heads, width]
    return torch.zeros(2, BLOCKS, SLOTS, HEADS, WIDTH, dtype=dtype)


def _permuted(dtype: torch.dtype) -> torch.Tensor:  # [blocks, 2, tokens, heads, width], heads before tokens in memory
    return torch.zeros(BLOCKS, 2, HEADS, SLOTS, WIDTH, dtype=dtype).transpose(2, 3)


def _padded(dtype: torch.dtype) -> torch.Tensor:  # [blocks, 2, tokens, heads, width], with a gap after each block
    return torch.zeros(BLOCKS, 3, SLOTS, HEADS, WIDTH, dtype=dtype)[:, :2]


def _latent(dtype: torch.dtype) -> torch.Tensor:  # [blocks, tokens, width]
    return torch.zeros(BLOCKS, SLOTS, 12, dtype=dtype)


LAYOUTS: dict[str, Layout] = {
    "heads": _heads,
    "halves": _halves,
    "permuted": _permuted,
    "padded": _padded,
    "latent": _latent,
}
BAD = [float("nan"), float("inf"), -float("inf"), 1e19, -1e19]


class Sample:
    """Layers with random caches, two groups of slots, and the owners of a step's rows.

    Args:
        seed: of all that is random.
        dtype: of the caches.
        kind: the caches' `kv_cache_dtype`.
        device: where it lies.
    """

    def __init__(self, seed: int, dtype: torch.dtype, kind: str = "auto", device: torch.device = CPU) -> None:
        rng = random.Random(seed)
        self.layers: dict[str, SimpleNamespace] = {}
        self.mapping: dict[str, torch.Tensor] = {}
        self.stored = torch.uint8 if kind.startswith("fp8") else dtype
        # Requests have blocks of their own; their rows are consecutive slots, from some slot of their first block on.
        blocks, slots, owners = rng.sample(range(BLOCKS), BLOCKS), [], []
        for owner in range(3):
            mine, first = [blocks.pop() for _ in range(3)], rng.randrange(SLOTS)
            count = rng.choice([1, 1, 5, 20])
            slots += [mine[at // SLOTS] * SLOTS + at % SLOTS for at in range(first, first + count)]
            owners += [rng.choice([owner, owner, -1])] * count
        slots += [-1, -1]
        owners += [-1, rng.choice([-1, 1])]
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)
        self.flags = torch.zeros(3, dtype=torch.int32, device=device)
        groups = [torch.tensor(slots + [7] * 3, device=device), torch.tensor(slots, dtype=torch.int32, device=device)]
        for name, make in LAYOUTS.items():
            cache = make(torch.float32)
            cache.copy_(torch.tensor(rng.choices([0.5, -3.0, 100.0], k=cache.numel())).view(cache.shape))
            for _ in range(rng.choice([0, 1, 4])):
                at = tuple(rng.randrange(size) for size in cache.shape)
                cache[at] = rng.choice(BAD)
            cache = self._as(cache, dtype, device)
            self.layers[name] = SimpleNamespace(
                kv_cache=cache, head_size=12 if name == "latent" else WIDTH, num_kv_heads=HEADS, kv_cache_dtype=kind
            )
            self.mapping[name] = rng.choice(groups)

    def _as(self, cache: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # any shape
        """Return a cache of another dtype with the same strides."""
        made = torch.empty_strided(cache.shape, cache.stride(), dtype=self.stored, device=device)
        numbers = cache.to(dtype)
        return made.copy_(numbers.view(torch.uint8) if self.stored == torch.uint8 else numbers)

    def by_reference(self) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Return the caches and flags that `GuardedCache.clean` leaves, on the host."""
        flags, caches = self.flags.cpu(), {}
        for name, layer in self.layers.items():
            cache = layer.kv_cache.cpu().clone()
            copy = SimpleNamespace(**{**vars(layer), "kv_cache": cache})
            one = GuardedCache.of(name, copy)
            assert one is not None
            one.clean(self.mapping[name][: len(self.owners)].cpu(), self.owners.cpu(), flags)
            caches[name] = cache
        return caches, flags.tolist()

    def check(self, launch: Callable[[CacheGuard], None]) -> int:
        """Compare what a launch leaves with the reference; return how many flags were raised."""
        caches, flags = self.by_reference()
        launch(CacheGuard(self.layers))
        assert self.flags.tolist() == flags
        for name, layer in self.layers.items():
            got, expected = layer.kv_cache.cpu(), caches[name]
            assert torch.equal(bits(got), bits(expected)), name
        return sum(flags)


def bits(tensor: torch.Tensor) -> torch.Tensor:  # any shape
    """Return the bytes of a tensor."""
    return tensor.contiguous().view(torch.uint8)


def _in_interpreter() -> int:
    from executor.model.kv_kernel import CacheTable, clean

    def launch(sample: Sample) -> Callable[[CacheGuard], None]:
        def run(guard: CacheGuard) -> None:
            assert all(one.parts is not None for one in guard.caches)
            for table in CacheTable.several(guard.caches, sample.mapping):
                clean(table, sample.owners, sample.flags)

        return run

    return sum(
        sample.check(launch(sample))
        for dtype in (torch.float32, torch.float16)
        for seed in range(12)
        for sample in [Sample(seed, dtype)]
    )


if __name__ == "__main__":
    print(f"compared, {_in_interpreter()} flags")
