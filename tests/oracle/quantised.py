"""Checkpoints with quantised weights, and the same weights as plain numbers for transformers.

Formats of vLLM: GPTQ and AWQ (four bits, groups), compressed-tensors (four bits in groups; eight bits with rounded activations),
FP8 (a scale for each tensor, or for each block), and MXFP4 (experts of gpt-oss). Some round what a layer is given too:
`rounding_activations` has transformers do the same.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32  # rows of a weight that share a scale
BLOCK = 128  # rows and columns of a weight that share a scale, in FP8 by blocks
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)(\.experts\.\d+)?\.\w+_proj\.weight")
# The order in which AWQ packs eight numbers of four bits.
_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(_FP8).max
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


def quantise(checkpoint: Path, folder: Path, method: str) -> tuple[Path, Path]:
    """Write a checkpoint with its linear layers quantised, and the same with plain weights.

    Args:
        checkpoint: a float32 checkpoint of llama's kind, with or without experts; for "mxfp4" of gpt-oss.
        folder: where to write both.
        method: one of `METHODS`.

    Returns:
        The quantised checkpoint, and the plain one.
    """
    packed, plain = folder / method, folder / f"{method}-plain"
    for one in (packed, plain):
        shutil.copytree(checkpoint, one)
    weights = load_file(checkpoint / "model.safetensors")
    made, numbers = {}, {}
    for name, weight in weights.items():
        if method == "mxfp4" and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors, numbers[name] = _mxfp4(weight)
            made |= {f"{name}_{end}": tensor.contiguous() for end, tensor in tensors.items()}
        elif method != "mxfp4" and _LINEAR.fullmatch(name):
            tensors, numbers[name] = METHODS[method](weight)
            stem = name.removesuffix(".weight")
            made |= {f"{stem}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
        else:
            made[name] = numbers[name] = weight
    save_file(made, packed / "model.safetensors", {"format": "pt"})
    save_file({name: one.contiguous() for name, one in numbers.items()}, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    said = CONFIGS[method] | _left_alone(method, list(weights))
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return packed, plain


def _left_alone(method: str, names: list[str]) -> dict[str, Any]:
    """Return what a configuration says of routers, which stay plain."""
    routers = [name.removesuffix(".weight") for name in names if name.endswith(".mlp.gate.weight")]
    if not routers:
        return {}
    return {"dynamic": {r"-:.*\.mlp\.gate$": {}}} if method == "gptq" else {"modules_to_not_convert": routers}


def rounding_activations(model: Any, method: str) -> None:
    """Have a transformers model round what its linear layers in decoder layers are given, as the method's kernels do."""
    rounds = ROUNDS.get(method)
    if rounds is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and _LINEAR.fullmatch(f"{name}.weight"):
            module.forward = _rounded(module.forward, rounds)


def _rounded(
    forward: Callable[[torch.Tensor], torch.Tensor], rounds: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:  # [..., width]
    return lambda given: forward(rounds(given.float()).to(given.dtype))


def _pack(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Return numbers of four bits, eight along a dimension in each whole number of 32 bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    numbers = numbers.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = (numbers << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, dim)


def _grouped(weight: torch.Tensor) -> torch.Tensor:  # [out, in] -> [groups, rows of a group, out]
    return weight.T.unflatten(0, (-1, GROUP))


def _gptq(weight: torch.Tensor) -> Packed:  # [out, in]
    groups = _grouped(weight)
    scales = (groups.abs().amax(1) / 7).half()  # [groups, out]
    numbers = (groups / scales.float()[:, None]).round().clamp(-8, 7)
    plain = (numbers * scales.float()[:, None]).flatten(0, 1).T
    rows = weight.shape[1]
    return {
        "qweight": _pack(numbers.flatten(0, 1) + 8, 0),
        "qzeros": _pack(torch.full(scales.shape, 7), 1),  # one less than the zero point, as GPTQ stores it
        "scales": scales,
        "g_idx": torch.arange(rows, dtype=torch.int32) // GROUP,
    }, plain


def _awq(weight: torch.Tensor) -> Packed:  # [out, in]
    groups = _grouped(weight)
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)  # [groups, out]
    numbers = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    plain = ((numbers - zeros[:, None]) * scales.float()[:, None]).flatten(0, 1).T

    def ordered(columns: torch.Tensor) -> torch.Tensor:
        return columns.unflatten(-1, (-1, 8))[..., _AWQ].flatten(-2)

    return {
        "qweight": _pack(ordered(numbers.flatten(0, 1)), 1),
        "qzeros": _pack(ordered(zeros), 1),
        "scales": scales,
    }, plain


def _compressed(weight: torch.Tensor) -> Packed:  # [out, in]
    groups = weight.unflatten(1, (-1, GROUP))  # [out, groups, columns of a group]
    scales = (groups.abs().amax(-1) / 7).half()
    numbers = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    return {
        "weight_packed": _pack(numbers.flatten(1) + 8, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }, (numbers * scales.float()[..., None]).flatten(1)


def _int8(weight: torch.Tensor) -> Packed:  # [out, in]
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def _fp8(weight: torch.Tensor) -> Packed:  # [out, in]
    scale = weight.abs().max() / _FP8_LARGEST
    numbers = (weight / scale).to(_FP8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def _fp8_block(weight: torch.Tensor) -> Packed:  # [out, in], both multiples of BLOCK
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, BLOCK, columns, BLOCK]
    scales = blocks.abs().amax((1, 3)) / _FP8_LARGEST
    numbers = (blocks / scales[:, None, :, None]).to(_FP8)
    plain = (numbers.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return {"weight": numbers.flatten(2).flatten(0, 1), "weight_scale_inv": scales}, plain


def _mxfp4(weight: torch.Tensor) -> Packed:  # [experts, in, out]
    groups = weight.transpose(1, 2).unflatten(-1, (-1, GROUP))  # [experts, out, groups, GROUP]
    powers = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scaled = groups / powers.exp2()[..., None]
    codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    plain = _FP4[codes] * scaled.sign() * powers.exp2()[..., None]
    codes = codes + 8 * (scaled < 0)
    return {
        "blocks": (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8),
        "scales": (powers + 127).to(torch.uint8),
    }, plain.flatten(2).transpose(1, 2)


def _by_token(given: torch.Tensor) -> torch.Tensor:  # [..., width]
    scales = given.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return (given / scales).round().clamp(-128, 127) * scales


def _by_tensor(given: torch.Tensor) -> torch.Tensor:  # [..., width]
    scale = given.abs().max().clamp(min=1e-10) / _FP8_LARGEST
    return (given / scale).to(_FP8).float() * scale


def _by_group(given: torch.Tensor) -> torch.Tensor:  # [..., width]
    groups = given.unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _FP8_LARGEST
    return ((groups / scales).to(_FP8).float() * scales).flatten(-2)


METHODS: dict[str, Callable[[torch.Tensor], Packed]] = {
    "gptq": _gptq,
    "awq": _awq,
    "w4a16": _compressed,
    "int8": _int8,
    "fp8": _fp8,
    "fp8-block": _fp8_block,
    "mxfp4": _mxfp4,
}
# What the kernels of a method round, beside the weights.
ROUNDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": _by_token,
    "fp8": _by_tensor,
    "fp8-block": _by_group,
}


def _groups(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_NUMBERS = {"type": "int", "symmetric": True, "dynamic": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "w4a16": _groups("pack-quantized", {**_NUMBERS, "num_bits": 4, "strategy": "group", "group_size": GROUP}, None),
    "int8": _groups(
        "int-quantized",
        {**_NUMBERS, "num_bits": 8, "strategy": "channel"},
        {**_NUMBERS, "num_bits": 8, "strategy": "token", "dynamic": True},
    ),
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
