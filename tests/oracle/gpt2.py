"""gpt2's modules have the same names and boundaries in vLLM as in transformers; only the layouts differ."""

from __future__ import annotations

from typing import Any

from tests.oracle.binding import Bindings


def bind(model: Any, to: Bindings) -> None:
    """Bind every location of a `GPT2LMHeadModel`, in the order of execution."""
    transformer = model.transformer
    to.output(transformer.wte, "transformer.wte", "embedding")
    to.output(transformer.wpe, "transformer.wpe", "embedding")
    for i, block in enumerate(transformer.h):
        path = f"transformer.h.{i}"
        to.input(block, path, "block")
        to.input(block.ln_1, f"{path}.ln_1", "norm")
        to.output(block.ln_1, f"{path}.ln_1", "norm")
        to.input(block.attn.c_attn, f"{path}.attn.c_attn", "column-input")
        to.linear(block.attn.c_attn, f"{path}.attn.c_attn", "column")
        to.row_input(block.attn.c_proj, f"{path}.attn.c_proj", made_by=f"{path}.attn.attn")
        to.linear(block.attn.c_proj, f"{path}.attn.c_proj", "row-output")
        to.attention(block.attn, f"{path}.attn")
        to.input(block.ln_2, f"{path}.ln_2", "norm")
        to.output(block.ln_2, f"{path}.ln_2", "norm")
        to.input(block.mlp, f"{path}.mlp", "mlp")
        to.input(block.mlp.c_fc, f"{path}.mlp.c_fc", "column-input")
        to.linear(block.mlp.c_fc, f"{path}.mlp.c_fc", "column")
        to.row_input(block.mlp.c_proj, f"{path}.mlp.c_proj")
        to.linear(block.mlp.c_proj, f"{path}.mlp.c_proj", "row-output")
        to.output(block.mlp, f"{path}.mlp", "mlp")
        to.output(block, path, "block")
    to.input(transformer.ln_f, "transformer.ln_f", "norm")
    to.output(transformer.ln_f, "transformer.ln_f", "norm")
