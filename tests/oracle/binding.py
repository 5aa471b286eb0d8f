"""A binding puts a hook on a transformers module and names it as vLLM does.

Each method of `Bindings` hooks one kind of module and reports its values, converted to vLLM's layout, to a `Visit`,
which returns the value to go on with. The hooks' list of locations is the only list there is.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tests.oracle.location import Kind, Location, Sharding


class Visit(Protocol):
    """Called with each value as the forward pass reaches it."""

    def __call__(self, path: str, kind: Kind, value: Any) -> Any:
        """Return the value to go on with: the very object that came in, or an edited one."""


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return transformers' [1, tokens, ...] as a view [tokens, ...]; some of its MLPs work on rows already."""
    return tensor.squeeze(0) if tensor.dim() > 2 else tensor


def batch(tensor: torch.Tensor) -> torch.Tensor:
    """Return rows [tokens, ...] as a view [1, tokens, ...]."""
    return tensor.unsqueeze(0)


def like(given: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return rows with the batch dimension that transformers' own tensor has, or without one."""
    return value.reshape(given.shape)


def choose(router: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What transformers' routers make of logits: the softmax's largest, renormalised where the router does so."""
    if hasattr(router, "router_jitter_noise"):
        sparse: Any = sys.modules[type(router).__module__]
        weights, experts = sparse.sparsemixer(
            logits, jitter_eps=router.router_jitter_noise, training=False, top_k=router.top_k
        )
        return logits, weights, experts
    weights, experts = torch.topk(logits.softmax(-1), router.top_k, dim=-1)
    if hasattr(router, "topk_method"):  # of deepseek, with one group of experts
        return logits, weights * router.routed_scaling_factor, experts
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


class Bindings:
    """The hooks of one run, and the locations that they serve in the order they were bound."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.locations: list[Location] = []
        self._handles: list[RemovableHandle] = []
        self._patched: list[tuple[Any, str, Any]] = []

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for owner, name, original in reversed(self._patched):
            setattr(owner, name, original)
        self._patched.clear()

    def add(self, path: str, kind: Kind, sharding: Sharding) -> None:
        """Say that a hook serves a location."""
        self.locations.append(Location(path, kind, sharding))

    def patch(self, owner: Any, name: str, new: Any) -> None:
        """Replace a function that is no module, until `remove`."""
        self._patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def before(self, module: nn.Module, hook: Any) -> None:
        """Register `hook(module, args)` ahead of a module's forward."""
        self._handles.append(module.register_forward_pre_hook(hook))

    def before_all(self, module: nn.Module, hook: Any) -> None:
        """Register `hook(args, kwargs)`, which returns both, ahead of a module's forward."""
        call = lambda _, args, kwargs: hook(args, kwargs)  # noqa: E731
        self._handles.append(module.register_forward_pre_hook(call, with_kwargs=True))

    def after(self, module: nn.Module, hook: Any) -> None:
        """Register `hook(module, args, output)` behind a module's forward."""
        self._handles.append(module.register_forward_hook(hook))

    def input(self, module: nn.Module, path: str, sharding: Sharding) -> None:
        """Bind the first positional argument."""
        self.add(path, "input", sharding)
        self.before(module, lambda _, args: (like(args[0], self.visit(path, "input", rows(args[0]))), *args[1:]))

    def output(self, module: nn.Module, path: str, sharding: Sharding) -> None:
        """Bind an output that is one tensor in both."""
        self.add(path, "output", sharding)
        self.after(module, lambda _, args, output: like(output, self.visit(path, "output", rows(output))))

    def linear(self, module: nn.Module, path: str, sharding: Sharding) -> None:
        """Bind the output of a linear layer, a pair with an absent bias in vLLM."""
        self.add(path, "output", sharding)
        self.after(module, lambda _, args, output: like(output, self.visit(path, "output", (rows(output), None))[0]))

    def attention(self, module: nn.Module, path: str, sharding: Sharding = "attention") -> None:
        """Bind the output of a module that gives a pair with the attention weights in transformers."""
        self.add(path, "output", sharding)
        self.after(module, lambda _, args, output: (batch(self.visit(path, "output", rows(output[0]))), *output[1:]))

    def router(self, module: nn.Module, path: str) -> None:
        """Bind a router, which gives logits alone in vLLM, and what is chosen by them as well in transformers."""
        self.input(module, path, "router")
        self.add(path, "output", "router")

        def after(_: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, _bias = self.visit(path, "output", (output[0], None))
            return output if logits is output[0] else choose(module, logits)

        self.after(module, after)

    def fused_linear(self, parts: list[nn.Module], path: str) -> None:
        """Bind linear layers that share one input and that vLLM merges into one, side by side.

        Args:
            parts: the layers in the order of the merged output, which is the order transformers calls them in.
            path: the merged layer's path.
        """
        self.add(path, "input", "column-input")
        self.add(path, "output", "column")
        outputs: list[torch.Tensor] = []

        def before_first(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = batch(self.visit(path, "input", rows(args[0])))
            made = [part.forward(x) for part in parts]  # forward itself: calling would run the hooks
            whole, _bias = self.visit(path, "output", (rows(torch.cat(made, dim=-1)), None))
            outputs[:] = batch(whole).split([each.shape[-1] for each in made], dim=-1)

        self.before(parts[0], before_first)
        for i, part in enumerate(parts):
            self.after(part, lambda _, args, output, i=i: outputs[i])

    def row_input(self, module: nn.Module, path: str, made_by: str | None = None) -> None:
        """Bind the input of a row-parallel layer.

        Args:
            module: the layer.
            path: its path.
            made_by: the path of the vLLM module whose output this input is, where transformers has a plain function.
        """
        if made_by is not None:
            self.add(made_by, "output", "row-input")
        self.add(path, "input", "row-input")

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor]:
            x = rows(args[0])
            if made_by is not None:
                x = self.visit(made_by, "output", x)
            return (like(args[0], self.visit(path, "input", x)),)

        self.before(module, hook)
