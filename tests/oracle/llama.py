"""llama and its descendants carry the residual stream in vLLM as a pair whose sum is what transformers carries.

vLLM fuses each addition to the stream with the norm that follows: a block returns `(added, residual)`, a norm takes the
pair and returns `(normalised, added + residual)`. transformers adds first and hands the sum to block and norm alike.
The pair is followed here beside the forward pass, and an edit of either half goes into the sum. gemma has two further norms
in a layer, of what is added, which take and give one tensor in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.oracle.binding import Bindings, batch, rows
from tests.oracle.location import Kind, Sharding


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

    def embedding(self, module: Any, path: str) -> None:
        """Bind the embedding, with which the stream begins; gemma's module scales it, which vLLM does outside of it."""
        scale = getattr(module, "embed_scale", None)
        if scale is None:
            self.to.output(module, path, "embedding")
        else:
            self.to.add(path, "output", "embedding")

        def begin(_: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            if scale is not None:
                plain = nn.functional.embedding(args[0], module.weight)
                output = batch(self.to.visit(path, "output", rows(plain))) * scale
            self.added, self.residual = rows(output), None
            return output

        self.to.after(module, begin)

    def attention(self, module: nn.Module, path: str) -> None:
        """Bind an attention module, whose output is added next."""
        self.to.attention(module, path)
        self.to.after(module, lambda _, args, output: setattr(self, "added", rows(output[0])))

    def adds(self, module: nn.Module, path: str, sharding: Sharding) -> None:
        """Bind the output of a module, which is added next."""
        self.to.output(module, path, sharding)
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
    """Bind every location of a model of llama's kind, in the order of execution."""
    stream = ResidualStream(to)
    stream.embedding(model.model.embed_tokens, "model.embed_tokens")
    for i, block in enumerate(model.model.layers):
        path = f"model.layers.{i}"
        stream.norm(block.input_layernorm, f"{path}.input_layernorm")
        attention(block.self_attn, f"{path}.self_attn", to)
        if hasattr(block, "pre_feedforward_layernorm"):
            to.attention(block.self_attn, f"{path}.self_attn")
            to.input(block.post_attention_layernorm, f"{path}.post_attention_layernorm", "norm")
            stream.adds(block.post_attention_layernorm, f"{path}.post_attention_layernorm", "norm")
            stream.norm(block.pre_feedforward_layernorm, f"{path}.pre_feedforward_layernorm")
            mlp(block.mlp, f"{path}.mlp", to)
            to.output(block.mlp, f"{path}.mlp", "mlp")
            to.input(block.post_feedforward_layernorm, f"{path}.post_feedforward_layernorm", "norm")
            stream.adds(block.post_feedforward_layernorm, f"{path}.post_feedforward_layernorm", "norm")
        else:
            stream.attention(block.self_attn, f"{path}.self_attn")
            stream.norm(block.post_attention_layernorm, f"{path}.post_attention_layernorm")
            mlp(block.mlp, f"{path}.mlp", to)
            stream.adds(block.mlp, f"{path}.mlp", "mlp")
        stream.block(block, path)
    stream.norm(model.model.norm, "model.norm")


def attention(module: Any, path: str, to: Bindings) -> None:
    """Bind what is inside an attention module."""
    to.fused_linear([module.q_proj, module.k_proj, module.v_proj], f"{path}.qkv_proj")
    for name in ("q_norm", "k_norm"):
        if hasattr(module, name):
            _head_norm(getattr(module, name), f"{path}.{name}", to)
    to.row_input(module.o_proj, f"{path}.o_proj", made_by=f"{path}.attn")
    to.linear(module.o_proj, f"{path}.o_proj", "row-output")


def _head_norm(module: nn.Module, path: str, to: Bindings) -> None:
    """Bind a norm of queries or keys, by heads or of all heads at once; gemma3 gives it [1, heads, tokens, width]."""
    to.add(path, "input", "heads")
    to.add(path, "output", "heads")
    heads_first = "Gemma" in type(module).__name__

    def visit(kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        given = tensor.transpose(1, 2) if heads_first else tensor
        value = batch(to.visit(path, kind, rows(given)))
        return value.transpose(1, 2) if heads_first else value

    to.before(module, lambda _, args: (visit("input", args[0]),))
    to.after(module, lambda _, args, output: visit("output", output))


def mlp(module: Any, path: str, to: Bindings) -> None:
    """Bind what is inside an MLP, or inside a mixture of experts, and what it is given."""
    to.input(module, path, "mlp")
    if hasattr(module, "experts"):
        to.router(module.gate, f"{path}.gate")
        return
    to.fused_linear([module.gate_proj, module.up_proj], f"{path}.gate_up_proj")
    to.row_input(module.down_proj, f"{path}.down_proj", made_by=f"{path}.act_fn")
    to.linear(module.down_proj, f"{path}.down_proj", "row-output")
