"""What a block cannot have of the model's weights, and how it reads weights that are larger than its room."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import executor.model.layouts
import executor.model.parameters
from executor.core.errors import Refusal
from executor.model.layouts import Columns, Layouts
from executor.model.node import Node
from executor.model.parameters import Parameters, Wanted, _by_rows, _segments, vocabulary_segments
from interpose.v1 import trace_pb2 as pb


def read(module: torch.nn.Module, name: str = "weight", memory_bytes: int = 1 << 30) -> Any:
    """Read a weight as a block of one rank does."""
    parameters = Parameters(1, memory_bytes, (8,))
    node = Node("part", module, Layouts("part", module, 1))
    return parameters.open(node, name, lambda wanted: parameters.read(node, wanted))


def table() -> torch.nn.Embedding:
    module = torch.nn.Embedding(100, 8)
    module.weight.data = torch.arange(800.0).reshape(100, 8)
    return module


def test_a_small_one_is_a_copy_of_the_blocks_own() -> None:
    module = table()
    weight = read(module)
    assert torch.equal(weight, module.weight) and not weight.requires_grad and not weight.is_inference()
    weight[:] = 0
    assert module.weight.any()
    norm = torch.nn.BatchNorm1d(3)
    assert torch.equal(read(norm, "running_var"), torch.ones(3)) and read(norm, "num_batches_tracked").item() == 0


def test_of_a_large_one_rows_are_read() -> None:
    module = table()
    large = read(module, memory_bytes=2000)
    assert (
        large.shape == (100, 8)
        and large.dtype is torch.float32
        and len(large) == 100
        and "model.part.weight" in repr(large)
    )
    for key in (5, -1, slice(2, 9, 3), [7, 3, 3], (slice(1, 3), 4), (5, 2)):
        assert torch.equal(large[key], module.weight[key]), key
    assert torch.equal(large[torch.tensor([4, 1])], module.weight[[4, 1]])
    assert torch.equal(large[torch.tensor(4)][0], module.weight[4])
    with pytest.raises(IndexError, match="100 rows"):
        large[100]


@pytest.mark.parametrize(
    "use",
    [
        lambda large: large @ torch.ones(8),
        lambda large: torch.ones(3, 100) @ large,
        lambda large: large * 2,
        lambda large: large.T,
        lambda large: large.mean(),
        lambda large: large[:90],
        lambda large: large[large],
        lambda large: large[torch.ones(100) > 0],
        lambda large: large.save(),
        lambda large: torch.softmax(large, -1),
        lambda large: list(map(float, [large])),
    ],
)
def test_all_of_a_large_one_is_refused_with_what_to_write(use: Any) -> None:
    with pytest.raises(Refusal, match=r"read some of its rows, model\.part\.weight\[token\]") as caught:
        use(read(table(), memory_bytes=2000))
    assert caught.value.code == pb.ERROR_CODE_QUOTA_EXCEEDED


def test_a_large_one_is_not_written_to() -> None:
    large = read(table(), memory_bytes=2000)
    with pytest.raises(Refusal, match="is read-only"):
        large[0] = 1


def test_packed_and_quantised_ones_are_refused_with_the_reason() -> None:
    module = table()
    module.quant_method = object()
    with pytest.raises(Refusal, match="quantised"):
        read(module)
    packed = torch.nn.Module()
    packed.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    packed.scaled = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    for name in ("weight", "scaled"):
        with pytest.raises(Refusal, match="cannot be given"):
            read(packed, name)


def test_rows_are_fetched_where_they_lie() -> None:
    """In parts, with heads that several ranks hold, as `Columns` gathers them."""
    assert _segments(Columns([(4, 1), (2, 2)]), 4) == [(0, 0, 4), (1, 0, 4), (2, 0, 4), (3, 0, 4), (0, 4, 2), (2, 4, 2)]
    assert Wanted("weight") != Wanted("weight", (1,)) and "rows=(1,)" in str(Wanted("weight", (1,)))


class Group:
    """The tensor-parallel group of threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self._here = threading.local()
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    @property
    def rank_in_group(self) -> int:
        rank: int = self._here.rank
        return rank

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self._given[self.rank_in_group] = tensor
        self._barrier.wait(60)
        whole = torch.cat(self._given, dim=dim)
        self._barrier.wait(60)
        return whole

    def run(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """Return what each rank's work gives."""

        def rank_of(rank: int) -> torch.Tensor:
            self._here.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.world_size) as threads:
            return list(threads.map(rank_of, range(self.world_size)))


@pytest.mark.parametrize("parts", [[(3, 1)], [(4, 1), (2, 1), (2, 1)], [(4, 1), (2, 2), (2, 2)], [(4, 1), (2, 4)]])
def test_rows_of_several_ranks_are_put_together(monkeypatch: pytest.MonkeyPatch, parts: list[tuple[int, int]]) -> None:
    """What `Columns` cuts over ranks by columns comes back as the rows of the weight, all of it and some of it."""
    group = Group(4)
    for module in (executor.model.parameters, executor.model.layouts):
        monkeypatch.setattr(module, "get_tp_group", lambda: group)
    layout = Columns(parts)
    whole = torch.randn(sum(width * 4 // copies for width, copies in parts), 5)
    some = torch.tensor([len(whole) - 1, 0, 3, 3])

    def read(rank: int) -> torch.Tensor:
        mine = layout.scatter(whole.t()).t()
        fetch = _by_rows(_segments(layout, 4), lambda rows: mine[rows], whole.device)
        return torch.cat([fetch(torch.arange(len(whole))), fetch(some)])

    for found in group.run(read):
        assert torch.equal(found, torch.cat([whole, whole[some]]))


def test_padding_of_the_vocabulary_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(4)
    monkeypatch.setattr(executor.model.parameters, "get_tp_group", lambda: group)
    padded = torch.randn(16, 3)
    segments = vocabulary_segments(4, 4, 10)
    assert segments == [(0, 0, 4), (1, 0, 4), (2, 0, 2)]

    def read(rank: int) -> torch.Tensor:
        return _by_rows(segments, lambda rows: padded[4 * rank :][rows], padded.device)(torch.arange(10))

    assert all(torch.equal(found, padded[:10]) for found in group.run(read))
