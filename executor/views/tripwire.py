"""Finds what a model's configuration says of attention that nothing here accounts for.

The attention pattern is computed anew from queries and keys, with what the engine's kernel says of itself: scale, window, soft
cap, slopes and sinks. A new architecture may have a further rule, under a name of its own. What is computed without that rule
would be another pattern. So a field that has to do with attention, has a value, and is not in the list below refuses the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OF_ATTENTION = re.compile(
    r"attn|attention|soft_?cap|sink|window|alibi|relative|qk|mask|temperature|rope|rotary|_kv|kv_|query|head_scal"
)
# What has no part in the probabilities of queries and keys as the kernel is given them.
_BEFORE_OR_AFTER = frozenset(
    "attention_bias attention_dropout attention_multiplier attention_out_bias attention_probs_dropout_prob "
    "attn_bias attn_dropout attn_pdrop attn_qkv_bias attn_output_gate add_qkv_bias kv_lora_rank max_position_embeddings "
    "multi_query n_kv_heads no_rope_layer_interval no_rope_layers num_attention_heads num_kv_heads num_key_value_heads "
    "num_kv_shared_layers parallel_attn partial_rotary_factor qk_head_dim qk_layernorm qk_nope_head_dim qk_norm qk_rope_head_dim "
    "qkv_bias rope_3d rope_interleave rope_interleaved rope_local_base_freq rope_parameters rope_pct rope_ratio rope_scaling "
    "rope_theta rotary_base rotary_dim rotary_emb_base rotary_pct use_parallel_residual use_qk_norm use_qkv_bias use_rope "
    "no_rope attention_in_fp32 attention_softmax_in_fp32 scale_attention_softmax_in_fp32 final_logit_softcapping "
    "global_attn_every_n_layers layer_norm_mask num_global_key_value_heads attention_k_eq_v global_partial_rotary_factor "
    "full_attention_interval attn_layer_period attn_layer_offset attn_type_list "
    "linear_num_key_heads linear_num_value_heads attention_in_multiplier attention_out_multiplier full_attn_idxs "
    "full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor "
    "num_sliding_attention_heads".split()
)
# What the kernel says of itself, as its scale, window, soft cap, slopes or sinks.
_OF_THE_KERNEL = frozenset(
    "alibi attn_logit_softcap attn_logit_softcapping interleaved_sliding_window layer_types max_window_layers "
    "query_pre_attn_scalar scale_attn_weights scale_attn_by_inverse_layer_idx sliding_window sliding_window_pattern "
    "sliding_window_size _sliding_window_pattern use_sliding_window window_size".split()
)
# How transformers itself runs a model.
_OF_TRANSFORMERS = frozenset(
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_implementation "
    "output_attentions temperature reorder_and_upcast_attn".split()
)
_ACCOUNTED = _BEFORE_OR_AFTER | _OF_THE_KERNEL | _OF_TRANSFORMERS
_MOST = 5


def unaccounted(config: Mapping[str, object]) -> list[str]:
    """Return the fields of a configuration that may change attention in an unknown way.

    Args:
        config: the fields of the model's text part. A field that is off (None, False, 0, or empty) changes nothing.
    """
    return sorted(
        name
        for name, value in config.items()
        if isinstance(name, str) and _OF_ATTENTION.search(name) and name not in _ACCOUNTED and _is_on(value)
    )


def _is_on(value: object) -> bool:
    if isinstance(value, bool | int | float | str | list | tuple | dict) or value is None:
        return bool(value) and value != "none"
    return True


def why_no_pattern(config: Mapping[str, object]) -> str:
    """Return why no attention pattern can be computed for a model; "" if one can."""
    fields = unaccounted(config)
    if not fields:
        return ""
    named = ", ".join(f"{name}={str(config[name])[:40]}" for name in fields[:_MOST])
    return (
        f"the model's configuration has {named}, of which it is not known what it does to attention; use attn.rot_q, attn.rot_k "
        "and attn.z"
    )
