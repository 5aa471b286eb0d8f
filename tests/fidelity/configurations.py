"""The configurations of checkpoints that are asked for most, with layers and widths cut down.

Each is written by hand: the class of transformers that reads it, the class of vLLM that serves it, and the facts that decide what
a model has: kinds of layers, kinds of attention, norms, biases, experts, multipliers, windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers

WIDTH, HEADS, HEAD, VOCABULARY, CONTEXT = 128, 4, 32, 500, 256
_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_HEAD = {"head_dim": HEAD}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
_SHARED = {"shared_expert_intermediate_size": WIDTH}
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
_INDEXED = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 2}
_POSITIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_expand": 2, "mamba_chunk_size": 16}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
}


@dataclass(frozen=True)
class Configuration:
    """One configuration.

    Attributes:
        architecture: vLLM's class, as a checkpoint names it.
        made: makes the configuration.
        checkpoints: the names of the checkpoints with this configuration.
    """

    architecture: str
    made: Callable[[], Any]
    checkpoints: tuple[str, ...]


def _of(architecture: str, config: str, *checkpoints: str, **facts: Any) -> Configuration:
    return Configuration(architecture, lambda: getattr(transformers, config)(**_SIZES | facts), checkpoints)


def _with_images(architecture: str, config: str, *checkpoints: str, **facts: Any) -> Configuration:
    """Return the configuration of a model that takes images too; its text part has the facts."""
    text = {**_SIZES, **facts}
    return Configuration(architecture, lambda: getattr(transformers, config)(text_config=text), checkpoints)


CONFIGURATIONS = (
    _of(
        "LlamaForCausalLM", "LlamaConfig", "Llama 3.1 8B, 70B", "Llama 3.2 1B, 3B", "Llama 3.3 70B", "SmolLM2", **_HEAD
    ),
    _with_images(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        "Llama 4 Scout, Maverick",
        **_HEAD,
        intermediate_size_mlp=2 * WIDTH,
        num_local_experts=8,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    ),
    _of("Qwen2ForCausalLM", "Qwen2Config", "Qwen2.5 0.5B to 72B", "DeepSeek R1 Distill Qwen"),
    _of("Qwen3ForCausalLM", "Qwen3Config", "Qwen3 0.6B to 32B", **_HEAD),
    _of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", "Qwen3 30B-A3B, 235B-A22B", **_HEAD, **_EXPERTS),
    _of("Qwen3NextForCausalLM", "Qwen3NextConfig", "Qwen3-Next 80B-A3B", **_HEAD, **_EXPERTS, **_SHARED, **_DELTA),
    _with_images(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        "Qwen3.5 0.8B to 27B",
        "Qwen3.6 27B",
        **_HEAD,
        **_DELTA,
        **_POSITIONS,
    ),
    _with_images(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        "Qwen3.5 35B-A3B, 122B-A10B, 397B-A17B",
        "Qwen3.6 35B-A3B",
        **_HEAD,
        **_EXPERTS,
        **_SHARED,
        **_DELTA,
        **_POSITIONS,
    ),
    _with_images(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        "Qwen2.5-VL 3B to 72B",
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [4, 6, 6]},
    ),
    _with_images(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        "Qwen3-VL 2B to 32B",
        **_HEAD,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    ),
    _of("Gemma2ForCausalLM", "Gemma2Config", "Gemma 2 2B to 27B", **_HEAD, **_SLIDING),
    _of("Gemma3ForCausalLM", "Gemma3TextConfig", "Gemma 3 270M, 1B", **_HEAD, **_SLIDING),
    _with_images("Gemma3ForConditionalGeneration", "Gemma3Config", "Gemma 3 4B to 27B", **_HEAD, **_SLIDING),
    _of(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        "Gemma 4 E2B, E4B, 31B (text)",
        **_HEAD,
        **_SLIDING,
        global_head_dim=HEAD,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=0,
    ),
    _of(
        "GptOssForCausalLM",
        "GptOssConfig",
        "gpt-oss 20B, 120B",
        **_HEAD,
        **_SLIDING,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    _of(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        "DeepSeek V2, V2 Lite",
        **_LATENT,
        **_ROUTED,
        first_k_dense_replace=1,
    ),
    _of(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        "DeepSeek V3, V3.1, R1",
        "Kimi K2",
        **_LATENT,
        **_ROUTED,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    ),
    _of(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        "DeepSeek V3.2",
        **_LATENT,
        **_ROUTED,
        **_INDEXED,
        first_k_dense_replace=1,
    ),
    _of("Glm4ForCausalLM", "Glm4Config", "GLM-4 9B, 32B (0414)", **_HEAD, partial_rotary_factor=0.5),
    _of(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        "GLM-4.5, 4.5-Air, 4.6, 4.7",
        **_HEAD,
        **_ROUTED,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    ),
    _of("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", "GLM-4.7-Flash", **_LATENT, **_ROUTED, first_k_dense_replace=1),
    _of("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", "GLM-5", **_LATENT, **_ROUTED, **_INDEXED, first_k_dense_replace=1),
    _of(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        "Nemotron-H 8B, Nemotron Nano 2",
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        chunk_size=16,
        head_dim=HEAD,
    ),
    _of("GraniteForCausalLM", "GraniteConfig", "Granite 3.3 2B, 8B", **_GRANITE),
    _of(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        "Granite 4.0 H Tiny, H Small",
        **_GRANITE,
        **_MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=WIDTH,
    ),
    _of("Olmo3ForCausalLM", "Olmo3Config", "OLMo 3 7B, 32B", **_SLIDING),
    _of("OlmoeForCausalLM", "OlmoeConfig", "OLMoE 1B-7B", num_experts=8, num_experts_per_tok=2),
    _of("MistralForCausalLM", "MistralConfig", "Mistral 7B", "Mistral Small 24B (text)", "Mistral Nemo", **_HEAD),
    _of("MixtralForCausalLM", "MixtralConfig", "Mixtral 8x7B, 8x22B", num_local_experts=8, num_experts_per_tok=2),
    _of("Phi3ForCausalLM", "Phi3Config", "Phi-3", "Phi-4 14B", "Phi-4 mini"),
    _of("SmolLM3ForCausalLM", "SmolLM3Config", "SmolLM3 3B"),
    _of("Cohere2ForCausalLM", "Cohere2Config", "Command R7B, Command A", **_SLIDING | {"sliding_window": 64}),
    _of("Exaone4ForCausalLM", "Exaone4Config", "EXAONE 4.0 1.2B, 32B", **_SLIDING),
)
