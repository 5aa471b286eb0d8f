"""What a recorded forward proves of the residual stream, on small models made for it; nothing is told by a class's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from executor.views.probe import record
from executor.views.stale import find_unused
from executor.views.stream import Point, StreamFinder

WIDTH = 16


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Layer(nn.Module):
    """Attention and MLP, each a linear layer behind a norm, one after the other on one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = linear(), linear()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream in the middle, and after the layer."""
        middle = x + self.attention(self.first(x))
        return middle, middle + self.mlp(self.second(middle))


class Stale(Layer):
    """Returns the stream, and what it was in the middle, which nobody uses."""

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        middle, end = self.halves(x)
        return end, middle


class Swapped(Layer):
    """The same, the other way round."""

    def forward(self, before: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle, end = self.halves(x)
        return middle, end


class Both(Layer):
    """Returns two tensors, both of which the next layer uses, and no module adds up."""

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        middle, end = self.halves(x if before is None else x + 0.01 * before)
        return end, middle


class Third(Layer):
    """Adds what a third part gives after the MLP, and scales the sum."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.third = linear(), linear()

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        _, end = self.halves(x)
        return (end + self.third(self.gate(end).sigmoid())) * self.scale, None


class Scaled(Third):
    scale = 0.7


class Parallel(Layer):
    """Attention and MLP on the same norm."""

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.first(x)
        return x + (self.attention(normed) + self.mlp(normed)), x


class Model(nn.Module):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])
        self.norm = nn.LayerNorm(WIDTH)
        self.swapped = kind is Swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before: torch.Tensor | None = None
        for layer in self.layers:
            x, before = reversed(layer(before, x)) if self.swapped else layer(x, before)
        normed: torch.Tensor = self.norm(x)
        return normed


class Probed:
    """A model, and what is found out about it."""

    def __init__(self, kind: type[Layer]) -> None:
        torch.manual_seed(0)
        self.model = Model(kind)
        paths = {module: path for path, module in self.model.named_modules()}
        x = torch.randn(1, WIDTH)

        @torch.no_grad()
        def run() -> None:
            self.model(x.clone())

        self.probe = record(paths, run)
        layers = ["layers.0", "layers.1"]
        pairs = StreamFinder(self.probe, WIDTH).unsummed(layers)
        unused = find_unused(paths, run, lambda mine: [mine], self.probe, pairs, WIDTH)
        self.finder = StreamFinder(self.probe, WIDTH, unused)

    def boundary(self, layer: int, kind: str) -> Point:
        return self.finder.boundary(f"layers.{layer}", kind)

    def middle(self) -> Point:
        path = "layers.1"
        children = [f"{path}.{name}" for name, _ in self.model.layers[1].named_children()]
        return self.finder.middle(path, children, f"{path}.attention", self.boundary(1, "output"))


@pytest.mark.parametrize(("kind", "at"), [(Stale, (0,)), (Swapped, (1,)), (Parallel, (0,))])
def test_of_two_tensors_the_one_that_is_used_is_the_stream(kind: type[Layer], at: tuple[int]) -> None:
    probed = Probed(kind)
    assert probed.boundary(0, "output").at == (at,)
    assert probed.boundary(1, "output").at == (at,)
    assert probed.boundary(1, "input").at == ((0, *at),)


def test_two_tensors_that_are_both_used_are_refused_and_not_to_be_added_up() -> None:
    probed = Probed(Both)
    point = probed.boundary(0, "output")
    assert point.at == ()
    assert "has 2 tensors of the model's width" in point.why and "none is known to be the stream" in point.why
    assert "use layers.0.output" not in point.why


@pytest.mark.parametrize("kind", [Stale, Third, Scaled])
def test_the_middle_lies_after_the_attention_and_before_the_mlp(kind: type[Layer]) -> None:
    """Not where a third part of the layer is given the stream, whatever the layer makes of their sum."""
    point = Probed(kind).middle()
    assert (point.path, point.kind, point.why) == ("layers.1.second", "input", "")


def test_parts_that_are_given_the_same_run_in_parallel() -> None:
    assert "attention and MLP in parallel" in Probed(Parallel).middle().why


class Lost(Layer):
    """Has no part that is given the stream in its middle: what it goes on with is another tensor."""

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        middle, end = self.halves(x)
        return end.tanh(), None


def test_a_layer_whose_result_is_no_sum_has_no_middle() -> None:
    assert "could not be established" in Probed(Lost).middle().why


def test_noise_of_rounding_is_no_use() -> None:
    """Ranks that add in another order from one forward to the next see the same model."""
    probed = Probed(Stale)
    calls: Callable[[], float] = iter([0.0, 1e-7]).__next__  # the second forward is the one with a tensor overwritten
    paths = {module: path for path, module in probed.model.named_modules()}
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def run() -> None:
        probed.model(x * (1 + calls()))

    probe = record(paths, run)
    pairs = StreamFinder(probe, WIDTH).unsummed(["layers.0", "layers.1"])
    assert find_unused(paths, run, lambda mine: [mine], probe, pairs, WIDTH)
