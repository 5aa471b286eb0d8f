"""What single experts compute in a transformers model, as its own eager forward multiplies it.

transformers runs the experts that any token chose in the order of their numbers, each with two calls of `linear`: into the hidden
layer, and back. What the second is given is the hidden layer, and what it returns is the expert's output. gpt-oss has a function
for the hidden layer, and its experts have biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.oracle.binding import Bindings

# Ends of the names of values that have the chosen experts side by side, in any order.
SETS = ("].mlp.experts", "].mlp.expert_weights", "].mlp.expert_act", "].mlp.expert_out")


def sorted_experts(value: torch.Tensor) -> torch.Tensor:
    """Return a value of chosen experts, [tokens, chosen] or [tokens, chosen, width], with the experts in an order of its own."""
    if value.dim() == 2:
        return value.sort(-1).values
    order = value[..., 0].argsort(-1)
    return value.gather(1, order.unsqueeze(-1).expand_as(value))


def single_experts(experts: Any, path: str, to: Bindings) -> None:
    """Bind the hidden layers and the outputs of the experts that the tokens chose."""
    for name in ("expert_act", "expert_out"):
        to.add(f"{path}.{name}", "output", "view")
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    linear = nn.functional.linear

    def listening(given: torch.Tensor, *args: Any) -> torch.Tensor:
        made = linear(given, *args)
        calls.append((given, made))
        return made

    def before(_: nn.Module, args: Any) -> None:
        calls.clear()
        numbers_of[:] = args[1].unique().tolist()
        nn.functional.linear = listening  # type: ignore[assignment]

    def after(_: nn.Module, args: Any, output: torch.Tensor) -> None:
        nn.functional.linear = linear  # type: ignore[assignment]
        chosen = args[1]
        assert len(calls) == 2 * len(numbers_of), "an expert is computed in another way than with two products"
        values = [one.new_empty(*chosen.shape, one.shape[-1]) for one in calls[1]]
        for number, pair in zip(numbers_of, calls[1::2], strict=True):
            place, token = torch.where(chosen.T.eq(number))  # the order in which transformers takes an expert's tokens
            for value, rows in zip(values, pair, strict=True):
                value[token, place] = rows
        to.visit(f"{path}.expert_act", "output", values[0])
        to.visit(f"{path}.expert_out", "output", values[1])

    def gated(given: torch.Tensor) -> torch.Tensor:
        made = gate(given)
        number = numbers_of[len(calls) // 2]
        calls.extend([(given, made), (made, made @ experts.down_proj[number] + experts.down_proj_bias[number])])
        return made

    gate = getattr(experts, "_apply_gate", None)
    numbers_of: list[int] = []
    if gate is not None:  # gpt-oss multiplies without `linear`
        to.patch(experts, "_apply_gate", gated)
    to.before(experts, before)
    to.after(experts, after)
