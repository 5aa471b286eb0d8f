"""Plans of a model on another device, traced without that device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from executor.graphs.tail import allowed
from executor.plan.record import Recorder
from executor.plan.refuse import Refused

CUDA = torch.device("cuda", 0)


def recorded(do: Callable[[torch.Tensor], torch.Tensor]) -> Recorder:
    """Return what is recorded of code that is given one row of a model on CUDA: [1, 4], bfloat16."""
    recorder = Recorder((__file__,), CUDA)
    row = recorder.input("row", (1, 4), None, torch.bfloat16)
    recorder.run(lambda: made.append(do(row)))
    return recorder


made: list[torch.Tensor] = []


def test_a_value_that_goes_to_the_host_stays_in_the_plan() -> None:
    recorder = recorded(lambda row: row.detach().float().cpu()[:, 1:] - 1)
    assert made[-1].device.type == "cpu"
    assert all(allowed(node) for node in recorder.graph.nodes if node.op == "call_function")


def test_new_tensors_are_on_the_models_device() -> None:
    recorded(lambda row: row * torch.zeros(4) + torch.full((), 2.0))
    assert made[-1].device == CUDA


def test_other_devices_are_refused() -> None:
    with pytest.raises(Refused, match="another device"):
        recorded(lambda row: torch.zeros(4, device="cpu"))
    with pytest.raises(Refused, match="another device"):
        recorded(lambda row: row.to("meta"))
