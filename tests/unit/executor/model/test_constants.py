"""Large tensors of sessions are made once, and no trace sees what another trace changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from executor.graphs.constants import Constants
from executor.model.constants import LEAST_BYTES, ConstantPool

COUNT = LEAST_BYTES // 4

# Ways to write to a tensor, also past torch's count of changes.
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "a view": lambda x: x[3:9].zero_(),
    "data": lambda x: x.data.zero_(),
    "numpy": lambda x: x.numpy().fill(7),
    "memory": lambda x: torch.frombuffer(memoryview(x.numpy()), dtype=torch.float32).fill_(9),
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x).fill_(5),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "an item of the storage": lambda x: x.untyped_storage().__setitem__(0, 3),
    "out": lambda x: torch.add(x, 1, out=x),
    "an index": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(4.0)),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False).data.fill_(1),
    "another tensor on the storage": lambda x: torch.empty(0).set_(x.untyped_storage()).fill_(3),
    "strides": lambda x: x.as_strided((4,), (2,)).fill_(0),
    "the engine's mode": lambda x: torch.inference_mode()(lambda: x.view(-1).mul_(0))(),
}


class Made:
    """Makes a tensor, and counts how often."""

    def __init__(self, first: float = 0, count: int = COUNT) -> None:
        self.times = 0
        self._range = first, count

    def __call__(self) -> torch.Tensor:  # [elements]
        self.times += 1
        first, count = self._range
        return torch.from_numpy(np.arange(count, dtype=np.float32) + np.float32(first))


def test_a_tensor_is_made_once_for_a_session_and_anew_for_another() -> None:
    pool, make = ConstantPool(), Made()
    one, two = pool.tensor("s", "k", make), pool.tensor("s", "k", make)
    assert make.times == 1 and torch.equal(one, two)
    assert pool.origin(one) == pool.origin(two) is not None
    other = pool.tensor("t", "k", make)
    assert make.times == 2 and torch.equal(one, other) and pool.origin(other) != pool.origin(one)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_reaches_no_other_copy(write: Callable[[torch.Tensor], object]) -> None:
    pool, make = ConstantPool(), Made()
    before, mine = pool.tensor("s", "k", make), pool.tensor("s", "k", make)
    write(mine)
    assert not torch.equal(mine, make()), "it was a write"
    assert pool.origin(mine) is None, "and the pool knows that"
    after = pool.tensor("s", "k", make)
    assert torch.equal(before, make()) and torch.equal(after, make())
    write(before)
    assert torch.equal(after, make()) and torch.equal(pool.tensor("s", "k", make), make())


def test_parts_have_the_same_origin_only_where_they_are_laid_out_alike() -> None:
    pool, make = ConstantPool(), Made()
    one, two = (pool.tensor("s", "k", make).view(128, -1) for _ in range(2))
    assert pool.origin(one[1]) == pool.origin(two[1]) is not None
    parts = [one, one.t(), one[1], one[2], one.view(-1), one[:, 0], one.view(torch.int32)]
    assert len({pool.origin(part) for part in parts}) == len(parts)
    assert pool.origin(one.clone()) is None and pool.origin(one + 0) is None
    assert pool.origin(torch.ones(8192, 2).t()) is None


def test_small_tensors_and_tensors_that_are_too_large_are_not_kept() -> None:
    pool = ConstantPool(4 * LEAST_BYTES, share=0.5)
    for count in (COUNT // 2, 3 * COUNT):
        make = Made(count=count)
        one, _ = pool.tensor("s", count, make), pool.tensor("s", count, make)
        assert make.times == 2 and pool.used == 0 and pool.origin(one) is None


def test_the_pool_is_bounded_and_a_session_takes_its_share_from_itself() -> None:
    pool = ConstantPool(4 * LEAST_BYTES, share=0.5)
    made = {key: Made(key) for key in range(3)}
    copies = {}
    for key, make in made.items():
        copies[key] = pool.tensor("s", key, make)
        pool.tensor("s", 0, made[0])
    assert pool.used == 2 * LEAST_BYTES, "half of the pool is for others"
    assert pool.origin(copies[1]) is None and torch.equal(copies[1], made[1]()), "a copy outlives its place there"
    pool.tensor("s", 1, made[1])
    assert [make.times for make in made.values()] == [1, 3, 1]
    others = [pool.tensor(f"s{i}", 0, Made(i)) for i in range(4)]
    assert pool.used == 4 * LEAST_BYTES and all(pool.origin(one) is not None for one in others)
    assert pool.origin(copies[0]) is None, "the tensor that was used longest ago goes first"


def test_a_device_without_memory_for_one_more_gives_the_pool_up() -> None:
    pool, kept = ConstantPool(), Made()
    copy = pool.tensor("s", "k", kept)
    tries: list[int] = []

    def make() -> torch.Tensor:  # [elements]
        tries.append(pool.used)
        if pool.used:
            raise torch.OutOfMemoryError
        return Made(5)()

    assert torch.equal(pool.tensor("s", "n", make), Made(5)()) and tries == [LEAST_BYTES, 0]
    assert pool.origin(copy) is None and torch.equal(copy, kept())
    pool.clear()

    def fails() -> torch.Tensor:  # never any
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        pool.tensor("s", "m", fails)


def test_programs_find_a_constant_by_its_origin_until_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, make = ConstantPool(), Made()
    constants = Constants(pool.origin)
    made = constants.add(pool.tensor("s", "k", make))
    made.users = 1
    looked: list[torch.Tensor] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: looked.append(one) or equal(one, other))
    assert constants.find(pool.tensor("s", "k", make)) is made and not looked
    changed = pool.tensor("s", "k", make)
    changed[0] = 5
    assert constants.find(changed) is None, "its own bits count"
    changed[0] = 0
    assert constants.find(changed) is made and looked
    other = pool.tensor("t", "k", make)
    del looked[:]
    assert constants.find(other) is made and looked
    del looked[:]
    assert constants.find(pool.tensor("t", "k", make)) is made and not looked
    constants.drop(made)
    assert constants.find(other) is None
