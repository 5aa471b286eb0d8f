"""opt has no MLP module: a layer holds the two projections itself, and in transformers they work on rows without a batch."""

from __future__ import annotations

from typing import Any

from tests.oracle.binding import Bindings


def bind(model: Any, to: Bindings) -> None:
    """Bind every location of an `OPTForCausalLM`, in the order of execution."""
    decoder, root = model.model.decoder, "model.decoder"
    to.output(decoder.embed_tokens, f"{root}.embed_tokens", "embedding")
    to.output(decoder.embed_positions, f"{root}.embed_positions", "embedding")
    for i, block in enumerate(decoder.layers):
        path, attention = f"{root}.layers.{i}", block.self_attn
        to.input(block, path, "block")
        to.input(block.self_attn_layer_norm, f"{path}.self_attn_layer_norm", "norm")
        to.output(block.self_attn_layer_norm, f"{path}.self_attn_layer_norm", "norm")
        to.fused_linear([attention.q_proj, attention.k_proj, attention.v_proj], f"{path}.self_attn.qkv_proj")
        to.row_input(attention.out_proj, f"{path}.self_attn.out_proj", made_by=f"{path}.self_attn.attn")
        to.linear(attention.out_proj, f"{path}.self_attn.out_proj", "row-output")
        to.attention(attention, f"{path}.self_attn")
        to.input(block.final_layer_norm, f"{path}.final_layer_norm", "norm")
        to.output(block.final_layer_norm, f"{path}.final_layer_norm", "norm")
        to.input(block.fc1, f"{path}.fc1", "column-input")
        to.linear(block.fc1, f"{path}.fc1", "column")
        to.row_input(block.fc2, f"{path}.fc2")
        to.linear(block.fc2, f"{path}.fc2", "row-output")
        to.output(block, path, "block")
    to.input(decoder.final_layer_norm, f"{root}.final_layer_norm", "norm")
    to.output(decoder.final_layer_norm, f"{root}.final_layer_norm", "norm")
