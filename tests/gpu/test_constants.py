"""Large tensors of a session are once on a GPU, until a trace writes to its own copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from executor.graphs.constants import Constants
from executor.model.constants import ConstantPool

GPU = torch.device("cuda")
ROWS, FEATURES = 512, 4096
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "a view": lambda x: x[3:9].zero_(),
    "data": lambda x: x.data.zero_(),
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x).fill_(5),
    "out": lambda x: torch.add(x, 1, out=x),
}


def make() -> torch.Tensor:  # [ROWS, FEATURES]
    return torch.arange(ROWS * FEATURES).remainder(251).to(torch.bfloat16).view(ROWS, FEATURES).to(GPU)


def test_copies_take_no_memory_and_reads_leave_them_shared() -> None:
    pool, x = ConstantPool(), torch.ones(3, ROWS, dtype=torch.bfloat16, device=GPU)
    first = pool.tensor("s", "k", make)
    before = torch.cuda.memory_allocated()
    copies = [pool.tensor("s", "k", make) for _ in range(8)]
    assert torch.cuda.memory_allocated() == before
    for one in copies:
        assert torch.equal(x @ one, x @ first) and torch.equal(one.sum(0), first.sum(0))
        assert torch.equal(torch.func.vmap(lambda row, w: row @ w, (0, None))(x, one), x @ first)
    torch.cuda.synchronize()
    assert {pool.origin(one) for one in copies} == {pool.origin(first)} != {None}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_reaches_no_other_copy(write: Callable[[torch.Tensor], object]) -> None:
    pool = ConstantPool()
    before, mine = pool.tensor("s", "k", make), pool.tensor("s", "k", make)
    write(mine)
    assert not torch.equal(mine, make()) and pool.origin(mine) is None
    assert torch.equal(before, make()) and torch.equal(pool.tensor("s", "k", make), make())


def test_a_program_s_constant_is_found_without_a_wait() -> None:
    pool = ConstantPool()
    constants = Constants(pool.origin)
    made = constants.add(pool.tensor("s", "k", make))
    copy = pool.tensor("s", "k", make)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert constants.find(copy) is made
    finally:
        torch.cuda.set_sync_debug_mode("default")
