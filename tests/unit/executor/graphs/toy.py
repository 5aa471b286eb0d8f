"""A small model of layers that pass a residual pair, as vLLM's do, with a fused projection to split into columns."""

from __future__ import annotations

import torch
from torch import nn

from executor.graphs.tables import Tables
from executor.graphs.taps import Site, Taps
from tests.unit.executor.graphs.samples import CPU, LIMITS

HIDDEN, LAYERS = 16, 3
ROWS = 24


class Layer(nn.Module):
    """A projection to three parts, and a way back; the sum with the residual is left to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, HIDDEN]
        residual = hidden if residual is None else hidden + residual
        q, k, v = self.qkv(torch.nn.functional.normalize(residual, dim=-1)).split(HIDDEN, -1)
        return self.out(torch.tanh(q) * k + v), residual


class Toy(nn.Module):
    """The layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [rows, HIDDEN]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


def make_toy(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> tuple[Toy, Taps, Tables]:
    """Return the model, its sites and their tables. Sites 3i, 3i+1, 3i+2: layer i's qkv, first output, and stream."""
    torch.manual_seed(0)
    toy = Toy().to(device, dtype).requires_grad_(False)
    sites: list[Site] = []
    for i in range(LAYERS):
        sites.append(Site(f"layers.{i}.qkv", "output", ((),), 3 * HIDDEN))
        sites.append(Site(f"layers.{i}", "output", ((0,),), HIDDEN))
        sites.append(Site(f"layers.{i}", "output", ((0,), (1,)), HIDDEN))
    tables = Tables([site.width for site in sites], 6, ROWS, dtype, device, LIMITS)
    return toy, Taps(dict(toy.named_modules()), sites, tables), tables
