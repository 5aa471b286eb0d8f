"""Which experts a mixture-of-experts layer chooses.

The layer's own router computes the choice from the router's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from executor.model.node import View
from executor.model.values import Served
from executor.views.view import tensor_at


@dataclass(frozen=True, eq=False)
class Chosen(View):
    """The experts of each token, or their weights.

    They are computed from the router's logits at the time of the read.

    Attributes:
        runner: the module that runs the experts and knows how they are chosen.
        item: 0 for the weights, 1 for the experts' numbers.
    """

    runner: Any
    item: int

    def read(self, served: Served) -> torch.Tensor:  # [rows, chosen experts]
        logits: torch.Tensor = tensor_at(served.value, (0,))

        def choose() -> torch.Tensor:  # [rows, chosen experts]
            # Routers need the hidden states for their number of rows only.
            rows = torch.empty(
                logits.shape[0], self.runner.moe_config.hidden_dim, dtype=logits.dtype, device=logits.device
            )
            chosen = self.runner.router.select_experts(hidden_states=rows, router_logits=logits.detach().clone())
            return chosen[self.item].clone()

        return served.derive(self, [logits], choose, self._put)

    def write(self, served: Served, value: object) -> NoReturn:
        raise self.read_only("change router_logits")

    def _put(self, before: torch.Tensor, now: torch.Tensor) -> NoReturn:  # [rows, chosen experts]
        raise self.read_only("change router_logits, or clone the value before you work on it")
