"""Which experts a mixture-of-experts layer chooses.

The layer's own router computes the choice from the router's logits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from executor.model.node import View
from executor.model.values import Served

# Asks the router of another process for the experts of some rows: the layer, `item`, and the router's logits.
Routes = Callable[[str, int, torch.Tensor], torch.Tensor]
_routes: list[Routes] = []


def route_by(routes: Routes) -> None:
    """Have the routers of this process's views asked in another process."""
    _routes[:] = [routes]


@dataclass(frozen=True, eq=False)
class Routed(View):
    """The experts of each token, or their weights, from the router's logits at the read.

    Attributes:
        item: 0 for the weights, 1 for the experts' numbers.
    """

    item: int

    @abstractmethod
    def choose(self, logits: torch.Tensor) -> torch.Tensor:  # [rows, experts] -> [rows, chosen experts]
        """Return what the layer's router makes of some logits."""

    def read(self, served: Served) -> torch.Tensor:  # [rows, chosen experts]
        logits: torch.Tensor = served.value if isinstance(served.value, torch.Tensor) else served.value[0]
        return served.derive(self, [logits], lambda: self.choose(logits), self._put)

    def write(self, served: Served, value: object) -> NoReturn:
        raise self.read_only("change router_logits")

    def _put(self, before: torch.Tensor, now: torch.Tensor) -> NoReturn:  # [rows, chosen experts]
        raise self.read_only("change router_logits, or clone the value before you work on it")


@dataclass(frozen=True, eq=False)
class Chosen(Routed):
    """What a router of this process chooses.

    Attributes:
        runner: the module that runs the experts and knows how they are chosen.
    """

    runner: Any

    def choose(self, logits: torch.Tensor) -> torch.Tensor:  # [rows, experts] -> [rows, chosen experts]
        # Routers need the hidden states for their number of rows only.
        config = self.runner.moe_config
        rows = torch.empty(logits.shape[0], config.hidden_dim, dtype=logits.dtype, device=logits.device)
        chosen = self.runner.router.select_experts(hidden_states=rows, router_logits=logits.detach().clone())
        made: torch.Tensor = chosen[self.item].clone()
        # Some layers scale what their experts give together, where others scale the weights.
        return made if self.item else made * self.runner.routed_scaling_factor


@dataclass(frozen=True, eq=False)
class ChosenThere(Routed):
    """What a router of another process chooses."""

    def choose(self, logits: torch.Tensor) -> torch.Tensor:  # [rows, experts] -> [rows, chosen experts]
        [routes] = _routes
        return routes(self.owner, self.item, logits)
