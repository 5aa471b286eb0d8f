"""Further architectures of the page: only their canonical values are measured, over one and two tensor-parallel ranks.

Each is a configuration of transformers that vLLM has code of its own for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from interpose.cli.demo_model import Shape

# Two layers show both kinds of those that alternate, and make two stages. Of the two key/value heads four ranks hold copies.
SHAPE = Shape(layers=2, hidden=128, context=256)
_SIZES = {
    "num_hidden_layers": SHAPE.layers,
    "hidden_size": SHAPE.hidden,
    "intermediate_size": 2 * SHAPE.hidden,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.kv_heads,
    "max_position_embeddings": SHAPE.context,
}
_HEADS = {"head_dim": SHAPE.head_size}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}


def _config(name: str, **values: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**values)


# The name of a column, and its configuration.
_ALL: dict[str, Callable[[], Any]] = {
    # Wider than the prompts: vLLM's window has one key more than that of transformers.
    "cohere2": _config("Cohere2Config", **_SIZES, **_WINDOWS | {"sliding_window": 64}, logit_scale=0.5),
    "ernie4_5": _config("Ernie4_5Config", **_SIZES, **_HEADS),
    "exaone4": _config("Exaone4Config", **_SIZES, **_WINDOWS),
    "gemma": _config("GemmaConfig", **_SIZES, **_HEADS),
    "gemma4": _config(
        "Gemma4TextConfig",
        **_SIZES,
        **_HEADS,
        **_WINDOWS | {"sliding_window": 64},
        global_head_dim=SHAPE.head_size,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=SHAPE.vocab,
        num_kv_shared_layers=0,
    ),
    "glm4": _config("Glm4Config", **_SIZES, **_HEADS, partial_rotary_factor=0.5),
    "granite": _config("GraniteConfig", **_SIZES, **_GRANITE),
    "minicpm3": _config(
        "MiniCPM3Config",
        **_SIZES | {"num_key_value_heads": SHAPE.heads},
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        scale_depth=1.0,
        scale_emb=3.0,
        dim_model_base=64,
    ),
    "mistral": _config("MistralConfig", **_SIZES, **_HEADS, sliding_window=8),
    "nemotron": _config("NemotronConfig", **_SIZES, **_HEADS),
    "phi3": _config("Phi3Config", **_SIZES),
    "qwen2_moe": _config(
        "Qwen2MoeConfig",
        **_SIZES,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=SHAPE.hidden,
        shared_expert_intermediate_size=SHAPE.hidden,
    ),
    "qwen3_next": _config(
        "Qwen3NextConfig",
        **_SIZES,
        **_HEADS,
        layer_types=["full_attention"] * SHAPE.layers,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=SHAPE.hidden,
        shared_expert_intermediate_size=SHAPE.hidden,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
}

# The columns that the page has.
_ON_THE_PAGE: tuple[str, ...] = (
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma4",
    "glm4",
    "granite",
    "mistral",
    "nemotron",
    "phi3",
    "qwen2_moe",
)
LIGHT = {name: _ALL[name] for name in _ON_THE_PAGE}
