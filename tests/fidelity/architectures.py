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
_FULL = ["full_attention"] * SHAPE.layers
_HYBRID = ["linear_attention", "full_attention"]
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_CHOSEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": SHAPE.hidden}
_SHARED = {"shared_expert_intermediate_size": SHAPE.hidden}
# Three positions for each token: of text they are alike.
_POSITIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
_PICTURES = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": SHAPE.hidden}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}


def _config(name: str, **values: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**values)


def _with_images(name: str, text: dict[str, Any]) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(text_config=text, vision_config=_PICTURES)


# The name of a column, and its configuration. `python -m tests.fidelity --try NAME` measures one before the page has it.
ALL: dict[str, Callable[[], Any]] = {
    # vLLM keeps the two numbers of its activation in bfloat16, and the oracle does so too.
    "apertus": _config("ApertusConfig", **_SIZES, **_HEADS),
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
        rms_norm_eps=1e-6,  # which transformers' norms of latents have whatever it is, and vLLM's not
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
    "qwen2_5_vl": _with_images("Qwen2_5_VLConfig", _SIZES | _SECTIONS),
    "qwen3_vl": _with_images("Qwen3VLConfig", _SIZES | _HEADS | _SECTIONS),
    "qwen3_5": _config("Qwen3_5TextConfig", **_SIZES, **_HEADS, **_DELTA, **_POSITIONS, layer_types=_FULL),
    "qwen3_5, Gated DeltaNet": _config(
        "Qwen3_5TextConfig", **_SIZES, **_HEADS, **_DELTA, **_POSITIONS, layer_types=_HYBRID
    ),
    "qwen3_next": _config(
        "Qwen3NextConfig",
        **_SIZES,
        **_HEADS,
        **_CHOSEN,
        **_SHARED,
        **_DELTA,
        layer_types=_FULL,
    ),
    "qwen3_next, Gated DeltaNet": _config(
        "Qwen3NextConfig", **_SIZES, **_HEADS, **_CHOSEN, **_SHARED, **_DELTA, layer_types=_HYBRID
    ),
    "mixtral": _config("MixtralConfig", **_SIZES, num_local_experts=8, num_experts_per_tok=2),
    "gpt_oss": _config("GptOssConfig", **_SIZES, **_HEADS, **_WINDOWS, num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v2": _config(
        "DeepseekV2Config",
        **_SIZES | {"num_key_value_heads": SHAPE.heads},
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=SHAPE.hidden,
    ),
    "granitemoehybrid": _config(
        "GraniteMoeHybridConfig",
        **_SIZES,
        **_GRANITE,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=2 * SHAPE.hidden,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_expand=2,
        mamba_chunk_size=16,
    ),
    "nemotron_h": _config(
        "NemotronHConfig",
        hidden_size=SHAPE.hidden,
        intermediate_size=2 * SHAPE.hidden,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_size,
        max_position_embeddings=SHAPE.context,
        # Each layer has one part alone.
        layers_block_type=["full_attention", "linear_attention", "mlp"],
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        chunk_size=16,
        # Time steps of a tenth. In prompts transformers has none below `time_step_min`; vLLM and the published code have any.
        time_step_floor=0.1,
        time_step_min=1e-30,
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
    "mixtral",
    "qwen3_5",
    "qwen3_next",
    "qwen3_vl",
    "qwen2_5_vl",
    "gpt_oss",
    "minicpm3",
    "granitemoehybrid",
    "nemotron_h",
    "deepseek_v2",
)
# Prompts of latent attention, which vLLM's CPU build neither cuts nor caches.
UNCUT = ("deepseek_v2",)
LIGHT = {name: ALL[name] for name in _ON_THE_PAGE}
