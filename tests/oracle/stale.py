"""stablelm and cohere return the stream from a layer, and with it what the stream was before the layer's last addition.

The second is dropped by the layer that comes next: only the first is what transformers goes on with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.oracle.binding import Bindings, batch, rows
from tests.oracle.llama import attention, mlp


class _Beside:
    """What vLLM returns beside the stream, as the forward pass has it now.

    Attributes:
        value: [tokens, hidden].
    """

    value: torch.Tensor

    def note(self, module: nn.Module, to: Bindings) -> None:
        """Note what a module is given."""
        to.before(module, lambda _, args: setattr(self, "value", rows(args[0])))

    def block(self, module: nn.Module, path: str, to: Bindings) -> None:
        """Bind what a block returns: the stream and this."""
        to.add(path, "output", "block")
        to.after(module, lambda _, args, output: batch(to.visit(path, "output", (rows(output), self.value))[0]))

    def norm(self, module: nn.Module, path: str, to: Bindings) -> None:
        """Bind a norm that returns this beside what it computes."""
        to.input(module, path, "block")
        to.add(path, "output", "norm")
        to.after(module, lambda _, args, output: batch(to.visit(path, "output", (rows(output), self.value))[0]))


def bind_stablelm(model: Any, to: Bindings) -> None:
    """Bind every location of a `StableLmForCausalLM`, in the order of execution."""
    beside = _Beside()
    to.output(model.model.embed_tokens, "model.embed_tokens", "embedding")
    for i, block in enumerate(model.model.layers):
        path = f"model.layers.{i}"
        _norm(block.input_layernorm, f"{path}.input_layernorm", to)
        _attention(block, path, to)
        beside.note(block.post_attention_layernorm, to)
        _norm(block.post_attention_layernorm, f"{path}.post_attention_layernorm", to)
        _mlp(block, path, to)
        beside.block(block, path, to)
    _norm(model.model.norm, "model.norm", to)


def bind_cohere(model: Any, to: Bindings) -> None:
    """Bind every location of a `CohereForCausalLM`, in the order of execution."""
    beside = _Beside()
    to.output(model.model.embed_tokens, "model.embed_tokens", "embedding")
    for i, block in enumerate(model.model.layers):
        path = f"model.layers.{i}"
        beside.note(block, to)
        beside.norm(block.input_layernorm, f"{path}.input_layernorm", to)
        _attention(block, path, to)
        _mlp(block, path, to)
        beside.block(block, path, to)
    beside.norm(model.model.norm, "model.norm", to)


def _norm(module: nn.Module, path: str, to: Bindings) -> None:
    to.input(module, path, "norm")
    to.output(module, path, "norm")


def _attention(block: Any, path: str, to: Bindings) -> None:
    attention(block.self_attn, f"{path}.self_attn", to)
    to.attention(block.self_attn, f"{path}.self_attn")


def _mlp(block: Any, path: str, to: Bindings) -> None:
    mlp(block.mlp, f"{path}.mlp", to)
    to.output(block.mlp, f"{path}.mlp", "mlp")
