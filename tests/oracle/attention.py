"""What a transformers model's attention is given and returns, as its own eager function has it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.oracle.binding import Bindings, batch, rows


def by_heads(path: str, count: int, to: Bindings) -> Callable[..., torch.Tensor]:
    """Return a hook for a projection of heads side by side."""

    def after(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return batch(to.visit(path, "output", rows(output).unflatten(-1, (count, -1))).flatten(-2))

    return after


def heads_out(path: str, count: int, to: Bindings) -> Callable[..., tuple[torch.Tensor]]:
    """Return a hook for what the heads' outputs are projected by."""

    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        z = args[0].view(-1, args[0].shape[-1]).unflatten(-1, (count, -1))
        return (to.visit(path, "output", z).flatten(-2).view_as(args[0]),)

    return before


class Kernel:
    """What one layer's attention function is given and returns.

    Args:
        path: the canonical attention.
        to: the bindings.
        scale: what the queries were multiplied by already.
    """

    def __init__(self, path: str, to: Bindings, scale: float) -> None:
        self._path, self._to, self._scale = path, to, scale
        self._length = 0

    def given(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Visit queries and this step's keys, [1, heads, tokens, width]; return the queries to go on with."""
        tokens = query.shape[2]
        self._length += tokens
        queries = query[0].transpose(0, 1) / self._scale
        query = (self._to.visit(f"{self._path}.rot_q", "output", queries) * self._scale).transpose(0, 1).unsqueeze(0)
        keys = key[0, :, -tokens:].transpose(0, 1)
        changed = self._to.visit(f"{self._path}.rot_k", "output", keys)
        if changed is not keys:
            keys.copy_(changed)  # the cache holds this tensor
        return query

    def returned(self, weights: torch.Tensor) -> None:
        """Visit the probabilities, [1, heads, tokens, keys]; a cache for a window does not return what it left behind."""
        missing = self._length - weights.shape[-1]
        self._to.visit(f"{self._path}.pattern", "output", nn.functional.pad(weights[0], (missing, 0)))


def patch_attention(first: nn.Module, kernels: dict[nn.Module, Kernel], to: Bindings) -> None:
    if hasattr(first, "_attn"):
        for attention, kernel in kernels.items():
            original: Any = attention._attn

            def method(query: Any, key: Any, *args: Any, kernel: Any = kernel, original: Any = original) -> Any:
                output, weights = original(kernel.given(query, key), key, *args)
                kernel.returned(weights)
                return output, weights

            to.patch(attention, "_attn", method)
        return
    home = sys.modules[type(first).__module__]
    eager = home.eager_attention_forward  # type: ignore[attr-defined]

    def function(module: nn.Module, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = eager(module, kernels[module].given(query, key), key, *args, **kwargs)
        kernels[module].returned(weights)
        return output, weights

    to.patch(home, "eager_attention_forward", function)
