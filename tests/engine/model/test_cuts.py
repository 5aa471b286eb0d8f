"""How a layer's columns lie over the ranks follows from its class only where its weights were loaded as the class loads them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from executor.core.errors import Refusal
from executor.model import layouts as shards
from executor.model.cuts import why_not_known
from executor.model.layouts import Columns, Layouts, Partial, Replicated, Unknown
from interpose.v1 import trace_pb2 as pb

WIDTH = 8  # of what a column-parallel layer is given


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


class Ranks:
    """One layer as each of several ranks has it.

    Args:
        make: makes it.
        ranks: how many there are.
    """

    def __init__(self, patch: pytest.MonkeyPatch, make: Any, ranks: int) -> None:
        self.patch = patch
        self.layers: list[Any] = []
        for rank in range(ranks):
            patch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=ranks, rank_in_group=rank))
            self.layers.append(make(rank))
            record_metadata_for_reloading(self.layers[-1])

    def load(self, whole: torch.Tensor, *shard: Any) -> None:
        """Have each rank load its part of a weight of the checkpoint."""
        for layer in self.layers:
            layer.weight.weight_loader(layer.weight, whole, *shard)

    def layout(self, rank: int, kind: str = "output", at: tuple[object, ...] = (0,)) -> Any:
        return Layouts("layer", self.layers[rank], len(self.layers)).of(kind, at)

    def gathered(self, parts: list[torch.Tensor], kind: str = "output", at: tuple[object, ...] = (0,)) -> torch.Tensor:
        """Return what the ranks' parts, [rows, columns], are together, and check that each gets its part back."""
        for rank, part in enumerate(parts):
            group = SimpleNamespace(
                world_size=len(parts), rank_in_group=rank, all_gather=lambda _, dim: torch.cat(parts, dim)
            )
            self.patch.setattr(shards, "get_tp_group", lambda group=group: group)
            whole: torch.Tensor = self.layout(rank, kind, at).gather(part)
            assert torch.equal(self.layout(rank, kind, at).scatter(whole), part)
        return whole


def rows(count: int) -> torch.Tensor:
    """A weight whose row i holds the number i."""
    return torch.arange(count).float()[:, None].expand(count, WIDTH).contiguous()


def computed(ranks: Ranks) -> list[torch.Tensor]:
    """What each rank computes of ones: WIDTH times the numbers of the rows it has."""
    return [torch.ones(1, WIDTH) @ layer.weight.t() for layer in ranks.layers]


@pytest.mark.parametrize("ranks", [2, 4])
def test_columns_of_vllms_own_layers_come_together_as_one_rank_has_them(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    column = Ranks(monkeypatch, lambda _: ColumnParallelLinear(WIDTH, 24, bias=False), ranks)
    column.load(rows(24))
    assert torch.equal(column.gathered(computed(column)), WIDTH * torch.arange(24.0)[None])
    sizes = [8, 16, 4]
    merged = Ranks(monkeypatch, lambda _: MergedColumnParallelLinear(WIDTH, sizes, bias=False), ranks)
    merged.load(rows(28))
    assert torch.equal(merged.gathered(computed(merged)), WIDTH * torch.arange(28.0)[None])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_heads_that_ranks_hold_copies_of_come_together_once(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Eight query heads and two key/value heads of four columns."""
    merged = Ranks(monkeypatch, lambda _: QKVParallelLinear(WIDTH, 4, 8, 2, bias=False), ranks)
    for shard, start, count in (("q", 0, 32), ("k", 32, 8), ("v", 40, 8)):
        merged.load(rows(48)[start : start + count], shard)
    assert torch.equal(merged.gathered(computed(merged)), WIDTH * torch.arange(48.0)[None])


def test_what_a_row_parallel_layer_is_given_comes_together_as_its_weight_was_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = Ranks(monkeypatch, lambda _: RowParallelLinear(24, WIDTH, bias=False, reduce_results=False), 2)
    row.load(rows(24).t().contiguous())
    given = [layer.weight[:1] for layer in row.layers]  # what its columns are multiplied by, by their numbers
    assert torch.equal(row.gathered(given, "input", (0, 0)), torch.arange(24.0)[None])
    assert isinstance(row.layout(0), Partial)


def mamba(rank: int, ranks: int = 2) -> ColumnParallelLinear:
    """The projection of a Mamba 2 layer with one group: [gate 8 | x 8 | B 4 | C 4 | dt 2], B and C copied to each rank."""
    layer = ColumnParallelLinear(WIDTH, 8 + 8 + 4 * ranks + 4 * ranks + 2, bias=False)
    group = (4 * ranks, 4 * (ranks - 1), True)
    spec = [(8, 0, False), (8, 0, False), group, group, (2, 0, False)]
    layer.weight.weight_loader = mamba_v2_sharded_weight_loader(spec, ranks, rank)
    return layer


def test_a_loader_of_the_models_own_gives_another_order_so_the_class_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, mamba, 2)
    ranks.load(rows(26))
    layer = ranks.layers[0]
    parts = computed(ranks)
    with pytest.MonkeyPatch.context() as patch:  # by the class alone: more columns than there are, in another order
        patch.setattr(shards, "why_not_known", lambda *_: "")
        by_class = ranks.gathered(parts)
        assert by_class.shape[-1] == layer.output_size == 34
        assert not torch.equal(by_class[:, :26], WIDTH * torch.arange(26.0)[None])
    layout = ranks.layout(0)
    assert isinstance(layout, Unknown)
    for use in (layout.gather, layout.scatter):
        with pytest.raises(Refusal, match=r"layer.output\[0\] cannot be given.*in a way of its own") as refused:
            use(parts[0])
        assert refused.value.code == pb.ERROR_CODE_UNKNOWN_LOCATION
    assert isinstance(ranks.layout(0, "input", (0, 0)), Replicated)


class HeadMajor(QKVParallelLinear):
    """Loads whole heads in the order of the checkpoint."""

    def weight_loader(self, param: Any, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        part = loaded_weight.chunk(self.tp_size)[self.tp_rank]
        param.data.copy_(part)


def test_what_is_not_vllms_own_way_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharded(_: int) -> ColumnParallelLinear:
        layer = ColumnParallelLinear(WIDTH, 24, bias=False)
        layer.weight.is_sharded_weight = True
        return layer

    def repacked(_: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(WIDTH, 24, bias=False)

    own = Ranks(monkeypatch, lambda _: HeadMajor(WIDTH, 4, 8, 2, bias=False), 2)
    assert "HeadMajor changes how" in why_not_known(own.layers[0], 2)
    assert isinstance(own.layout(0), Unknown)
    assert isinstance(Ranks(monkeypatch, sharded, 2).layout(0), Unknown)
    # Kernels that repack a weight leave one without a loader.
    packed = Ranks(monkeypatch, repacked, 2)
    packed.layers[0].weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    assert isinstance(packed.layout(0), Columns)
    assert why_not_known(packed.layers[0], 4) == "it is spread over 2 ranks and the model over 4"
    unrecorded = ColumnParallelLinear(WIDTH, 24, bias=False)
    assert "no record" in why_not_known(unrecorded, 2)


def test_several_parts_that_a_layer_gathers_itself_are_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Ranks(monkeypatch, lambda _: ColumnParallelLinear(WIDTH, 24, bias=False, gather_output=True), 2)
    assert isinstance(one.layout(0), Replicated)
    two = Ranks(monkeypatch, lambda _: MergedColumnParallelLinear(WIDTH, [8, 16], bias=False, gather_output=True), 2)
    assert isinstance(two.layout(0), Unknown)


def test_a_loader_that_wraps_the_classs_own_counts_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where weights are quantized while they are loaded."""
    import functools

    def wrapped(_: int) -> ColumnParallelLinear:
        layer = ColumnParallelLinear(WIDTH, 24, bias=False)
        own = layer.weight.weight_loader

        @functools.wraps(own, assigned=("__doc__",))
        def later(*args: Any) -> None:
            own(*args)

        layer.weight.weight_loader = later
        return layer

    assert isinstance(Ranks(monkeypatch, wrapped, 2).layout(0), Columns)


class WithMore(ColumnParallelLinear):
    """Has something of its own, and computes as its class does."""

    def more(self) -> int:
        return self.output_size


def test_a_subclass_that_loads_and_computes_as_its_class_counts_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(Ranks(monkeypatch, lambda _: WithMore(WIDTH, 24, bias=False), 2).layout(0), Columns)
