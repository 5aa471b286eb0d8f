"""llama and qwen3 carry the residual stream in vLLM as a pair whose sum is what transformers carries.

vLLM fuses each addition to the stream with the norm that follows: a block returns `(added, residual)`, a norm takes the
pair and returns `(normalised, added + residual)`. transformers adds first and hands the sum to block and norm alike.
The pair is followed here beside the forward pass, and an edit of either half goes into the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.oracle.binding import Bindings, batch, rows


class ResidualStream:
    """The pair as vLLM has it at the point that the forward pass has reached.

    Attributes:
        added: what the embedding, attention or MLP last gave, [tokens, hidden].
        residual: the stream before that, [tokens, hidden]; a view of transformers' own tensor, so that writing to it
            changes what transformers adds to next. None before the first norm.
    """

    def __init__(self, to: Bindings) -> None:
        self.to = to
        self.added: torch.Tensor
        self.residual: torch.Tensor | None = None

    def embedding(self, module: nn.Module, path: str) -> None:
        """Bind the embedding, with which the stream begins."""
        self.to.output(module, path, "embedding")

        def begin(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self.added, self.residual = rows(output), None

        self.to.after(module, begin)

    def attention(self, module: nn.Module, path: str) -> None:
        """Bind an attention module, whose output is added next."""
        self.to.attention(module, path)
        self.to.after(module, lambda _, args, output: setattr(self, "added", rows(output[0])))

    def mlp(self, module: nn.Module, path: str) -> None:
        """Bind an MLP's output, which is added next."""
        self.to.output(module, path, "mlp")
        self.to.after(module, lambda _, args, output: setattr(self, "added", rows(output)))

    def norm(self, module: nn.Module, path: str) -> None:
        """Bind a norm that adds first.

        The tensor that transformers gives to the norm is the one it later adds to, so an edit of the stream is written
        into it in place. The first norm has nothing to add: its input and its output are single tensors, and a
        replacement of its input stays in the norm.
        """
        self.to.add(path, "input", "norm")
        self.to.add(path, "output", "norm")
        alone = False

        def before(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            nonlocal alone
            added, before_it = self.to.visit(path, "input", self.added), self.residual
            alone = before_it is None
            self.residual = rows(args[0])
            if before_it is None:
                return (batch(added),)
            if added is not self.added:
                self.residual.copy_(before_it + added)
            return args

        def after(_: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            if alone:
                return batch(self.to.visit(path, "output", rows(output)))
            assert self.residual is not None
            normalised, residual = self.to.visit(path, "output", (rows(output), self.residual))
            self.residual.copy_(residual)
            return batch(normalised)

        self.to.before(module, before)
        self.to.after(module, after)

    def block(self, module: nn.Module, path: str) -> None:
        """Bind a block's output, the pair itself; transformers goes on with its sum."""
        self.to.add(path, "output", "block")

        def after(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            self.added, self.residual = self.to.visit(path, "output", (self.added, self.residual))
            return batch(self.residual + self.added)

        self.to.after(module, after)


def bind(model: Any, to: Bindings) -> None:
    """Bind every location of a `LlamaForCausalLM` or `Qwen3ForCausalLM`, in the order of execution."""
    stream = ResidualStream(to)
    stream.embedding(model.model.embed_tokens, "model.embed_tokens")
    for i, block in enumerate(model.model.layers):
        path = f"model.layers.{i}"
        attention, mlp = block.self_attn, block.mlp
        stream.norm(block.input_layernorm, f"{path}.input_layernorm")
        to.fused_linear([attention.q_proj, attention.k_proj, attention.v_proj], f"{path}.self_attn.qkv_proj")
        for name in ("q_norm", "k_norm"):
            if hasattr(attention, name):
                to.input(getattr(attention, name), f"{path}.self_attn.{name}", "heads")
                to.output(getattr(attention, name), f"{path}.self_attn.{name}", "heads")
        to.row_input(attention.o_proj, f"{path}.self_attn.o_proj", made_by=f"{path}.self_attn.attn")
        to.linear(attention.o_proj, f"{path}.self_attn.o_proj", "row-output")
        stream.attention(attention, f"{path}.self_attn")
        stream.norm(block.post_attention_layernorm, f"{path}.post_attention_layernorm")
        to.input(mlp, f"{path}.mlp", "mlp")
        to.fused_linear([mlp.gate_proj, mlp.up_proj], f"{path}.mlp.gate_up_proj")
        to.row_input(mlp.down_proj, f"{path}.mlp.down_proj", made_by=f"{path}.mlp.act_fn")
        to.linear(mlp.down_proj, f"{path}.mlp.down_proj", "row-output")
        stream.mlp(mlp, f"{path}.mlp")
        stream.block(block, path)
    stream.norm(model.model.norm, "model.norm")
