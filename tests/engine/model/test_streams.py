"""Where the model is on another of a device's streams, a block runs on the step's, between what comes before and after there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from executor.model.hooks import Hooks
from executor.model.streams import StepStream
from executor.model.tree import ModuleTree


class Stream:
    """A stream of a device that this machine lacks: it notes who waits for whom."""

    def __init__(self, name: str, device: Device) -> None:
        self.name, self._device = name, device

    def wait_stream(self, other: Stream) -> None:
        self._device.notes.append(f"{self.name} waits for {other.name}")


class Device:
    """A device with two streams, in the place of torch's.

    Attributes:
        notes: what happened, in order.
        current: the stream that is the current one.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.main, self.beside = Stream("main", self), Stream("beside", self)
        self.current = self.main
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "stream", self.use)
        patch.setattr(
            torch.Tensor, "record_stream", lambda _, stream: self.notes.append(f"kept for {stream.name}"), raising=False
        )

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


class Model(torch.nn.Module):
    """Calls its part on the stream beside."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.part = torch.nn.Identity()
        self._device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._device.use(self._device.beside):
            made: torch.Tensor = self.part(x)
        return made


def test_a_hook_on_another_stream_follows_it_and_is_waited_for(device: Device) -> None:
    model = Model(device)
    tree = ModuleTree(model, 1)
    tree.device = torch.device("cuda")

    def visit(node: Any, kind: str, value: Any) -> Any:
        device.notes.append(f"{node.path or 'model'}.{kind} on {device.current.name}")
        return value + 1 if node.path else value

    hooks = Hooks(tree, visit)
    hooks.add("part", "output")
    hooks.add("", "output")
    hooks.begin_step()
    assert float(model(torch.zeros(1))) == 1.0
    hooks.clear()
    assert device.notes == [
        "main waits for beside",
        "part.output on main",
        "beside waits for main",
        "kept for beside",
        "model.output on main",
    ]


def test_a_cpu_has_no_streams(device: Device) -> None:
    stream = StepStream(torch.device("cpu"))
    stream.begin()
    device.current = device.beside
    assert stream.visit(lambda: device.current.name) == "beside"
    assert device.notes == []
