"""The canonical values of a transformers model, under the names and in the shapes that this system gives them.

transformers keeps the parts of every architecture apart, so each value is at one of its modules; `PARTS` says where. What
attention multiplies and its probabilities are taken from transformers' own eager attention function, whose arguments and
result they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.oracle.attention import Kernel, by_heads, heads_out, patch_attention
from tests.oracle.binding import Bindings, batch, choose, like, rows
from tests.oracle.experts import single_experts


@dataclass(frozen=True)
class Parts:
    """Where an architecture keeps its canonical values, by module names; those in a layer relative to the layer.

    Attributes:
        middle: the module that is first given the stream between attention and MLP; None if there is no such stream.
        merged: the layer that gives q, k and v side by side; None if three layers do.
        router: of a mixture of experts, the layer that the experts are chosen by; it is beside `experts`.
        shared: of a mixture of experts, the MLP that every token has.
        prescaled: whether queries are scaled before they come to the attention function.
        after_attention: the norm of the attention's output; None if the output is added as it is.
        mlp_in: the module that is given the MLP's input.
        mlp_out: the module whose output is added after the middle.
        gate_up: the layer that gives gate and up side by side; None if two layers do.
        multiplier: the number of the configuration that attention's and MLP's outputs are multiplied with.
        embed_multiplier: the number of the configuration that embeddings are multiplied with.
        by_depth: whether these outputs are multiplied with `scale_depth / sqrt(num_hidden_layers)`.
        gated: whether the layer of queries gives a gate behind each head's query.
        heads: whether queries, keys and values are each given by a layer, so that there are heads to compare.
        linear: what a layer without attention has in its place.
        alone: what each layer has as its only part: attention, a mixer in its place, or an MLP, as its `block_type` says.
    """

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    attention: str = "self_attn"
    merged: str | None = None
    out: str = "o_proj"
    middle: str | None = "post_attention_layernorm"
    gate: str | None = "mlp.gate_proj"
    up: str | None = "mlp.up_proj"
    down: str | None = "mlp.down_proj"
    router: str | None = None
    shared: str | None = None
    prescaled: bool = False
    after_attention: str | None = None
    mlp_in: str = "mlp"
    mlp_out: str = "mlp"
    gate_up: str | None = None
    multiplier: str | None = None
    embed_multiplier: str | None = None
    by_depth: bool = False
    heads: bool = True
    gated: bool = False
    linear: str = "linear_attn"
    alone: str | None = None


_GPT = Parts(
    "transformer.h",
    "transformer.wte",
    "transformer.ln_f",
    "attn",
    "c_attn",
    "c_proj",
    "ln_2",
    None,
    "mlp.c_fc",
    "mlp.c_proj",
)
_GPTJ = Parts(
    "transformer.h",
    "transformer.wte",
    "transformer.ln_f",
    "attn",
    None,
    "out_proj",
    None,
    None,
    "mlp.fc_in",
    "mlp.fc_out",
)
_OPT = Parts(
    layers="model.decoder.layers",
    embed="model.decoder.embed_tokens",
    norm="model.decoder.final_layer_norm",
    out="out_proj",
    middle="final_layer_norm",
    gate=None,
    up="fc1",
    down="fc2",
    prescaled=True,
    mlp_in="fc1",
    mlp_out="fc2",
)
_GEMMA = Parts(
    middle="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_EXPERTS = Parts(gate=None, up=None, down=None, router="mlp.gate")
_IMAGES = Parts("model.language_model.layers", "model.language_model.embed_tokens", "model.language_model.norm")
PARTS = {
    "cohere": Parts(middle=None),
    "llama": Parts(),
    "stablelm": Parts(),
    "qwen2": Parts(),
    "qwen3": Parts(),
    "gpt2": _GPT,
    "gptj": _GPTJ,
    "opt": _OPT,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmoe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "apertus": Parts(middle="feedforward_layernorm", gate=None),
    "cohere2": Parts(middle=None),
    "ernie4_5": Parts(),
    "exaone4": Parts(middle="mlp", after_attention="post_attention_layernorm", mlp_out="post_feedforward_layernorm"),
    "gemma": Parts(),
    "gemma4_text": _GEMMA,
    "glm4": Parts(after_attention="post_self_attn_layernorm", mlp_out="post_mlp_layernorm", gate_up="mlp.gate_up_proj"),
    "granite": Parts(multiplier="residual_multiplier", embed_multiplier="embedding_multiplier"),
    "minicpm3": Parts(by_depth=True, heads=False),
    "mistral": Parts(),
    "nemotron": Parts(gate=None),
    "qwen3_5_text": Parts(gated=True),
    "qwen2_5_vl": _IMAGES,
    "qwen3_vl": _IMAGES,
    "qwen3_next": replace(_EXPERTS, shared="mlp.shared_expert", gated=True),
    "phi3": Parts(merged="qkv_proj", gate_up="mlp.gate_up_proj"),
    "mixtral": _EXPERTS,
    "qwen2_moe": replace(_EXPERTS, shared="mlp.shared_expert"),
    "granitemoe": replace(
        _EXPERTS,
        router="block_sparse_moe.router",
        mlp_in="block_sparse_moe",
        mlp_out="block_sparse_moe",
        multiplier="residual_multiplier",
        embed_multiplier="embedding_multiplier",
    ),
    "granitemoehybrid": Parts(
        linear="mamba",
        gate_up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
        mlp_in="shared_mlp",
        mlp_out="shared_mlp",
        multiplier="residual_multiplier",
        embed_multiplier="embedding_multiplier",
    ),
    "deepseek_v2": replace(_EXPERTS, shared="mlp.shared_experts", heads=False),
    "nemotron_h": Parts(
        embed="model.embeddings",
        norm="model.norm_f",
        attention="mixer",
        middle=None,
        gate=None,
        up="mixer.up_proj",
        down="mixer.down_proj",
        mlp_in="mixer",
        mlp_out="mixer",
        alone="mixer",
    ),
    "phimoe": replace(_EXPERTS, router="mlp.router"),
    "gpt_oss": replace(_EXPERTS, router="mlp.router"),
}
_HEADS_FIRST = ("Gemma3", "Apertus", "Exaone")  # whose norms of heads are given [1, heads, tokens, width]


def bind(model: Any, to: Bindings) -> None:
    """Bind every canonical value of a model, in the order of execution."""
    parts = PARTS[model.config.model_type]
    config = model.config.get_text_config()
    scales = [getattr(config, name) if name else 1.0 for name in (parts.embed_multiplier, parts.multiplier)]
    if parts.by_depth:
        scales[1] = config.scale_depth / math.sqrt(config.num_hidden_layers)
    _stream_out(model.get_submodule(parts.embed), "embed.output", to, scales[0])
    kernels: dict[nn.Module, Kernel] = {}
    for i, layer in enumerate(model.get_submodule(parts.layers)):
        path = f"blocks.{i}"
        _stream_in(layer, f"{path}.resid_pre", to)
        mixer, mlp = _mixer_and_mlp(layer, parts)
        if mixer:
            _given(layer.get_submodule(mixer), f"{path}.attn_in", to)
            if mixer == parts.attention and not _without_heads(layer, parts):
                _attention(layer, parts, config, f"{path}.attn", to, kernels)
            _stream_out(layer.get_submodule(parts.after_attention or mixer), f"{path}.attn_out", to, scales[1])
        if parts.middle is not None:
            _in_place(layer.get_submodule(parts.middle), f"{path}.resid_mid", to)
        if mlp:
            _given(layer.get_submodule(parts.mlp_in), f"{path}.mlp_in", to)
            _mlp(layer, parts, f"{path}.mlp", to)
            _stream_out(layer.get_submodule(parts.mlp_out), f"{path}.mlp_out", to, scales[1])
        _stream_out(layer, f"{path}.resid_post", to)
    if kernels:
        patch_attention(next(iter(kernels)), kernels, to)
    norm = model.get_submodule(parts.norm)
    _stream_in(norm, "final_norm.input", to)
    to.output(norm, "final_norm.output", "view")


def _mixer_and_mlp(layer: Any, parts: Parts) -> tuple[str, bool]:
    """Return what mixes a layer's tokens, "" if nothing does, and whether the layer has an MLP."""
    if parts.alone is not None:
        return ("", True) if layer.block_type == "mlp" else (parts.alone, False)
    return parts.attention if getattr(layer, parts.attention, None) is not None else parts.linear, True


def _without_heads(layer: Any, parts: Parts) -> bool:
    """Return whether a layer's mixer has no queries, keys and values to compare."""
    return not parts.heads or (parts.alone is not None and layer.block_type != "full_attention")


def _stream_in(module: nn.Module, path: str, to: Bindings) -> None:
    to.add(path, "output", "view")
    to.before(module, lambda _, args: (batch(to.visit(path, "output", rows(args[0]))), *args[1:]))


def _given(module: nn.Module, path: str, to: Bindings) -> None:
    """Bind the tensor that a part of a layer is given; a change reaches this part alone."""
    to.add(path, "output", "view")

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args[0] if args else kwargs["hidden_states"]
        new = to.visit(path, "output", given.view(-1, given.shape[-1])).view_as(given)
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    to.before_all(module, before)


def _in_place(module: nn.Module, path: str, to: Bindings) -> None:
    """Bind the stream at a module's input; a change goes into the tensor that the residual connection adds to as well."""
    to.add(path, "output", "view")

    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        stream = args[0].view(-1, args[0].shape[-1])
        new = to.visit(path, "output", stream)
        if new is not stream:
            stream.copy_(new)

    to.before(module, before)


def _stream_out(layer: nn.Module, path: str, to: Bindings, scale: float = 1.0) -> None:
    """Bind a module's output, times a number that the model multiplies it with later."""
    to.add(path, "output", "view")

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        shown = first.view(-1, first.shape[-1]) * scale if scale != 1 else first.view(-1, first.shape[-1])
        visited = to.visit(path, "output", shown)
        new = first if visited is shown else like(first, visited / scale)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    to.after(layer, after)


def _attention(
    layer: Any, parts: Parts, config: Any, path: str, to: Bindings, kernels: dict[nn.Module, Kernel]
) -> None:
    attention = layer.get_submodule(parts.attention)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for name in ("q", "k", "v"):
        to.add(f"{path}.{name}", "output", "view")
    if parts.merged is not None:

        def split(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            counts = (heads, kv_heads, kv_heads)
            width = output.shape[-1] // sum(counts)
            pieces = [
                to.visit(f"{path}.{name}", "output", piece.unflatten(-1, (count, -1))).flatten(-2)
                for name, count, piece in zip(
                    "qkv", counts, rows(output).split([width * count for count in counts], dim=-1), strict=True
                )
            ]
            return batch(torch.cat(pieces, dim=-1))

        to.after(attention.get_submodule(parts.merged), split)
    else:
        if parts.gated:
            to.add(f"{path}.gate", "output", "view")
            to.after(attention.q_proj, _with_gates(path, heads, to))
        alone = () if parts.gated else (("q", heads),)
        for name, count in (*alone, ("k", kv_heads), ("v", kv_heads)):
            to.after(attention.get_submodule(f"{name}_proj"), by_heads(f"{path}.{name}", count, to))
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        norm = getattr(attention, f"{name}_norm", None)
        if norm is not None:
            _norm_of_heads(norm, f"{path}.norm_{name}", count, to)
    scale = attention.scaling if parts.prescaled else 1.0
    kernels[attention] = Kernel(path, to, scale)
    for name in ("rot_q", "rot_k", "pattern", "z"):
        to.add(f"{path}.{name}", "output", "view")

    to.before(attention.get_submodule(parts.out), heads_out(f"{path}.z", heads, to))


def _norm_of_heads(norm: nn.Module, path: str, count: int, to: Bindings) -> None:
    """Bind a norm of queries or keys; gemma gives it [1, heads, tokens, width], olmoe all heads side by side."""
    to.add(path, "output", "view")
    heads_first = any(name in type(norm).__name__ for name in _HEADS_FIRST)

    def after(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        made = rows(output.transpose(1, 2) if heads_first else output)
        value = batch(to.visit(path, "output", made if made.dim() == 3 else made.unflatten(-1, (count, -1))))
        return value.transpose(1, 2) if heads_first else value.reshape(output.shape)

    to.after(norm, after)


def _with_gates(path: str, count: int, to: Bindings) -> Callable[..., torch.Tensor]:
    """Bind queries and gates, which one layer gives head by head."""

    def after(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        both = rows(output).unflatten(-1, (count, -1)).chunk(2, dim=-1)
        named = zip(("q", "gate"), both, strict=True)
        return batch(torch.cat([to.visit(f"{path}.{name}", "output", one) for name, one in named], dim=-1).flatten(-2))

    return after


def _dense(layer: Any, gate: str | None, up: str | None, down: str | None, path: str, to: Bindings) -> None:
    for name, where in (("gate", gate), ("up", up)):
        if where is not None:
            to.add(f"{path}.{name}", "output", "view")
            to.after(layer.get_submodule(where), _flat(f"{path}.{name}", to))
    if down is not None:
        to.add(f"{path}.act", "output", "view")
        to.before(
            layer.get_submodule(down),
            lambda _, args: (to.visit(f"{path}.act", "output", args[0].view(-1, args[0].shape[-1])).view_as(args[0]),),
        )


def _mlp(layer: Any, parts: Parts, path: str, to: Bindings) -> None:
    if parts.gate_up is not None:
        for name in ("gate", "up"):
            to.add(f"{path}.{name}", "output", "view")

        def halves(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            pieces = zip(("gate", "up"), rows(output).chunk(2, dim=-1), strict=True)
            return like(output, torch.cat([to.visit(f"{path}.{name}", "output", one) for name, one in pieces], dim=-1))

        to.after(layer.get_submodule(parts.gate_up), halves)
    gate, up = (parts.gate, parts.up) if parts.gate_up is None else (None, None)
    _dense(layer, gate, up, parts.down, path, to)
    if parts.shared is not None:
        _dense(layer, *(f"{parts.shared}.{name}_proj" for name in ("gate", "up", "down")), f"{path}.shared", to)
    if parts.router is not None:
        for name in ("router_logits", "experts", "expert_weights"):
            to.add(f"{path}.{name}", "output", "view")

        def chosen(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            order = (0, 1, 2) if output[0].is_floating_point() else (2, 1, 0)  # granite's router gives them reversed
            found = tuple(output[i] for i in order)
            logits = to.visit(f"{path}.router_logits", "output", found[0])
            if logits is not found[0]:
                found = choose(router, logits)
            to.visit(f"{path}.experts", "output", found[2])
            to.visit(f"{path}.expert_weights", "output", found[1])
            return tuple(found[i] for i in order)

        router = layer.get_submodule(parts.router)
        to.after(router, chosen)
        single_experts(layer.get_submodule(parts.router.rpartition(".")[0]).experts, path, to)


def _flat(path: str, to: Bindings) -> Callable[..., torch.Tensor]:
    """Bind rows that come with a batch dimension in most architectures, and without one in opt."""

    def after(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return to.visit(path, "output", output.view(-1, output.shape[-1])).view_as(output)

    return after
