"""gptj runs attention and MLP side by side on one norm; vLLM merges q, k and v and passes positions first."""

from __future__ import annotations

from typing import Any

from tests.oracle.binding import Bindings


def bind(model: Any, to: Bindings) -> None:
    """Bind every location of a `GPTJForCausalLM`, in the order of execution."""
    transformer = model.transformer
    to.output(transformer.wte, "transformer.wte", "embedding")
    for i, block in enumerate(transformer.h):
        path, attention, mlp = f"transformer.h.{i}", block.attn, block.mlp
        to.input(block.ln_1, f"{path}.ln_1", "norm")
        to.output(block.ln_1, f"{path}.ln_1", "norm")
        to.fused_linear([attention.q_proj, attention.k_proj, attention.v_proj], f"{path}.attn.qkv_proj")
        to.row_input(attention.out_proj, f"{path}.attn.out_proj", made_by=f"{path}.attn.attn")
        to.linear(attention.out_proj, f"{path}.attn.out_proj", "row-output")
        to.attention(attention, f"{path}.attn")
        to.input(mlp, f"{path}.mlp", "mlp")
        to.input(mlp.fc_in, f"{path}.mlp.fc_in", "column-input")
        to.linear(mlp.fc_in, f"{path}.mlp.fc_in", "column")
        to.row_input(mlp.fc_out, f"{path}.mlp.fc_out")
        to.linear(mlp.fc_out, f"{path}.mlp.fc_out", "row-output")
        to.output(mlp, f"{path}.mlp", "mlp")
        to.attention(block, path, "block")
    to.input(transformer.ln_f, "transformer.ln_f", "norm")
    to.output(transformer.ln_f, "transformer.ln_f", "norm")
