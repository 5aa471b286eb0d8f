"""Functions, classes and objects of a notebook's own, in a block that runs in a real engine."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

import interpose
from tests.engine.conftest import Bench
from tests.engine.notebook import notebook
from tests.oracle import Edit, difference

PROMPT = [5, 400, 17, 99, 256]


@pytest.fixture
def model(bench: Bench) -> Any:
    return notebook(bench.engine)


def mlp(bench: Bench, layer: int) -> Any:
    """The truth at a layer's MLP."""
    return bench.oracle.run(PROMPT).value(bench.block(layer) + ".mlp")


class Autoencoder(torch.nn.Module):
    """A sparse autoencoder as a notebook has one."""

    threshold = torch.tensor(0.05)

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.encoder = torch.nn.Linear(width, features)
        self.decoder = torch.nn.Parameter(torch.randn(features, width, generator=generator))
        self.register_buffer("scale", torch.full((features,), 0.5))
        self.names = {"kind": "sae"}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.encoder(x)) * self.scale
        return torch.where(found > self.threshold, found, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) @ self.decoder


def layers_of(model: Any, bench: Bench) -> Any:
    return model.transformer.h if bench.arch == "gpt2" else model.model.layers


def test_a_torch_module_of_the_notebooks(bench: Bench, model: Any) -> None:
    truth = mlp(bench, 1)
    sae = Autoencoder(truth.shape[-1], 7).eval()
    layer = layers_of(model, bench)[1]
    with model.trace(PROMPT):
        out = layer.mlp.output
        features = sae.encode(out).save()
        decoded = sae(out).save()
        kinds = [type(sae.decoder).__name__, sae.training, sae.names["kind"], isinstance(sae, Autoencoder)].save()
    with torch.no_grad():
        assert difference(features, sae.encode(truth)) <= 1e-4
        assert difference(decoded, sae(truth)) <= 1e-4
    assert kinds == ["Parameter", False, "sae", True]


@dataclasses.dataclass
class Recorder:
    """Reads, changes and saves locations from methods."""

    model: Any
    layers: list[int]
    gpt2: bool
    seen: dict = dataclasses.field(default_factory=dict)

    def record(self) -> None:
        for layer in self.layers:
            self.seen[layer] = self.blocks[layer].mlp.output.save()

    @property
    def blocks(self) -> Any:
        return self.model.transformer.h if self.gpt2 else self.model.model.layers

    def silence(self, layer: int) -> None:
        self.blocks[layer].mlp.output[:] = 0


def test_methods_read_change_and_save_locations(bench: Bench, model: Any) -> None:
    recorder = Recorder(model, [0, 1], bench.arch == "gpt2")
    with model.trace(PROMPT, max_tokens=2, ignore_eos=True) as tracer:
        for _ in tracer.iter[0]:
            recorder.record()
            seen = recorder.seen
            recorder.silence(2)
            logits = model.logits.output.save()
    for layer in (0, 1):
        assert difference(seen[layer], mlp(bench, layer)) <= 1e-4
    edit = Edit(bench.block(2) + ".mlp", "output", lambda value: value * 0)
    assert difference(logits, bench.oracle.run(PROMPT, 1, [edit]).logits[0]) <= 1e-4


places = ["the notebook"]


def only_here(cls: Any) -> Any:
    if places != ["the notebook"]:
        raise ValueError("not here")
    return cls


@only_here
class Picky:
    def f(self) -> int:
        return 1


def test_a_class_that_fails_while_it_is_made_fails_its_trace_alone(
    bench: Bench, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "places", ["the worker"])
    with pytest.raises(interpose.InterventionError, match="ValueError: not here") as caught:
        with model.trace(PROMPT):
            x = Picky
    assert 'raise ValueError("not here")' in caught.value.remote_traceback
    layer = layers_of(model, bench)[0]
    with model.trace(PROMPT):
        out = layer.mlp.output.save()
    assert difference(out, mlp(bench, 0)) <= 1e-4
