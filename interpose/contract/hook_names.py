"""The hook names of TransformerLens, and the canonical values that have the same meaning.

A name has the form "blocks.3.attn.hook_q". The values of TransformerLens have a batch dimension in front; the values of a block
have none.
"""

from __future__ import annotations

import difflib
import re

# For each hook of a layer: the part of `model.blocks[i]`, and the names of the value, of which a model has one or takes the
# first. The order is the order of the forward pass.
OF_LAYERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hook_resid_pre": ("", ("resid_pre",)),
    "attn.hook_q": ("attn", ("q",)),
    "attn.hook_k": ("attn", ("k",)),
    "attn.hook_v": ("attn", ("v",)),
    "attn.hook_rot_q": ("attn", ("rot_q",)),
    "attn.hook_rot_k": ("attn", ("rot_k",)),
    "attn.hook_pattern": ("attn", ("pattern",)),
    "attn.hook_z": ("attn", ("z",)),
    "hook_attn_out": ("", ("attn_out",)),
    "hook_resid_mid": ("", ("resid_mid",)),
    "mlp.hook_pre": ("mlp", ("gate", "up")),
    "mlp.hook_pre_linear": ("mlp", ("up",)),
    "mlp.hook_post": ("mlp", ("act",)),
    "hook_mlp_out": ("", ("mlp_out",)),
    "hook_resid_post": ("", ("resid_post",)),
}
OF_MODELS: dict[str, tuple[str, tuple[str, ...]]] = {"hook_embed": ("embed", ("output",))}

# Why a hook has no counterpart, by its name without the layer.
REFUSED: dict[str, str] = {
    "attn.hook_attn_scores": "attention kernels hold no scores; the probabilities are attn.pattern",
    "attn.hook_result": "no head's own result is computed; multiply attn.z of the head with its rows of the output projection",
    "hook_pos_embed": "position embeddings are a module of their own name, e.g. model.transformer.wpe.output; see print(model)",
    "hook_q_input": "the norm's output is the input of all projections; split inputs exist in TransformerLens alone",
    "hook_k_input": "the norm's output is the input of all projections; split inputs exist in TransformerLens alone",
    "hook_v_input": "the norm's output is the input of all projections; split inputs exist in TransformerLens alone",
    "hook_attn_in": "it is the stream before the norm, for attention alone; what the norm gives to attention is attn_in",
    "hook_mlp_in": "it is the stream before the norm, for the MLP alone; what the norm gives to the MLP is mlp_in",
    "ln1.hook_scale": "the norm's kernel holds no scale; compute it from resid_pre",
    "ln1.hook_normalized": "the norm is a module of its own name, and its output has the norm's weights; see print(model)",
    "ln2.hook_scale": "the norm's kernel holds no scale; compute it from resid_mid",
    "ln2.hook_normalized": "the norm is a module of its own name, and its output has the norm's weights; see print(model)",
    "ln_final.hook_scale": "the norm's kernel holds no scale; compute it from model.final_norm.input",
    "ln_final.hook_normalized": "model.final_norm.output is the stream after the last norm, with the norm's weights",
}

_OF_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")
_SHORT = re.compile(r"(?:(attn|mlp|ln1|ln2)\.)?(?:hook_)?(\w+)")


def written(name: str) -> str:
    """Return the code that replaces a hook: "model.blocks[i].attn.q" for "hook_q".

    Returns:
        The code; "" if nothing replaces the hook.
    """
    for start, table in (("model.blocks[i].", OF_LAYERS), ("model.", OF_MODELS)):
        for full, (part, values) in table.items():
            if full.rpartition(".")[2] == name:
                return " or ".join(f"{start}{part}{'.' if part else ''}{value}" for value in values)
    return ""


def reason(name: str) -> str:
    """Return why a hook's last part has no counterpart; "" if that is unknown."""
    found = [why for full, why in REFUSED.items() if full.rpartition(".")[2] == name]
    return found[0] if found else ""


def full_name(name: str, layer: int | None = None, part: str | None = None) -> str:
    """Return a hook's full name: "blocks.5.hook_resid_post" for ("resid_post", 5).

    Args:
        name: a full name, or a short name: "resid_post", "q", "pattern", "post".
        layer: the layer's number, for a short name of a layer.
        part: "attn" or "mlp", where a short name is not clear.
    """
    if layer is None:
        return name if "." in name or name.startswith("hook_") else f"hook_{name}"
    short = _SHORT.fullmatch(name)
    last = f"hook_{short[2]}" if short is not None else name
    known = [full for full in (*OF_LAYERS, *REFUSED) if full.rpartition(".")[2] == last]
    inside = part or (short[1] if short is not None else None)
    chosen = [full for full in known if inside is None or full.startswith(f"{inside}.")]
    return f"blocks.{layer}.{chosen[0] if chosen else last}"


def place_of(name: str) -> tuple[int | None, str, tuple[str, ...]]:
    """Return layer, part, and the names of the value for the full name of a hook.

    Raises:
        KeyError: the hook has no counterpart; the text gives the reason, or similar names.
    """
    found = _OF_LAYER.fullmatch(name)
    layer, rest = (int(found[1]), found[2]) if found is not None else (None, name)
    table = OF_MODELS if layer is None else OF_LAYERS
    if rest in table:
        return layer, *table[rest]
    if rest in REFUSED:
        raise KeyError(f"{name} has no counterpart in a served model: {REFUSED[rest]}")
    near = difflib.get_close_matches(rest, table, n=3)
    shown = [one if layer is None else f"blocks.{layer}.{one}" for one in near or table]
    raise KeyError(f"there is no hook {name!r}; {'did you mean' if near else 'there are'} {', '.join(shown)}")
