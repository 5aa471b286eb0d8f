"""Objects of libraries, torch modules and containers, mean in a block what they mean outside of it."""

from __future__ import annotations

import collections
import re
import types
from typing import Any

import torch

from tests.engine.shipping.worker import Shipped


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("bias", torch.ones(2), persistent=False)
        self.tied = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x)) + self.bias


def test_torch_modules_with_their_parameters_and_buffers() -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(5, 3)
    with torch.no_grad():
        expected = net(x)
    names = [name for name, _ in net.named_parameters()], list(net.state_dict())
    with Shipped():
        out = net(x).save()
        same = [net.tied is net.layers[0].weight, net.training].save()
        found = ([name for name, _ in net.named_parameters()], list(net.state_dict())).save()
    assert torch.allclose(out, expected) and same == [True, False] and found == names
    assert len(net._forward_hooks) == 0


def test_a_torch_module_is_trained_in_a_block() -> None:
    torch.manual_seed(0)
    probe, x = torch.nn.Linear(3, 1), torch.randn(8, 3)
    before = probe.weight.clone()
    with Shipped():
        optimizer = torch.optim.SGD(probe.parameters(), 0.05)
        losses = [].save()
        for _ in range(5):
            with torch.enable_grad():
                loss = (probe(x) - 1).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        weight = probe.weight.detach().save()
    assert losses == sorted(losses, reverse=True) and not torch.equal(weight, before)
    assert torch.equal(probe.weight, before), "the notebook's own module is another one"


def test_containers_of_the_standard_library() -> None:
    lists: Any = collections.defaultdict(list, a=[1])
    counts, last, pattern = collections.Counter("aab"), collections.deque([1, 2], 2), re.compile("a+", re.I)
    names = types.SimpleNamespace(x=3)
    with Shipped():
        lists["b"].append(2)
        counts["a"] += 1
        last.append(3)
        found = [dict(lists), counts["a"], list(last), pattern.findall("xAay"), names.x].save()
        back = collections.Counter(counts).save()
    assert found == [{"a": [1], "b": [2]}, 3, [2, 3], ["Aa"], 3]
    assert type(back) is collections.Counter and back == {"a": 3, "b": 1}
