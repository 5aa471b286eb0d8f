"""Checkpoints with quantised weights, and the same weights as plain numbers for transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32  # rows of a weight that share a scale
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
# The order in which AWQ packs eight numbers of four bits.
_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def quantise(checkpoint: Path, folder: Path, method: str) -> tuple[Path, Path]:
    """Write a checkpoint with its linear layers quantised, and the same with plain weights.

    Args:
        checkpoint: a float32 checkpoint of llama's kind.
        folder: where to write both.
        method: "gptq" or "awq".

    Returns:
        The quantised checkpoint, and the plain one.
    """
    packed, plain = folder / method, folder / f"{method}-plain"
    for one in (packed, plain):
        shutil.copytree(checkpoint, one)
    weights = load_file(checkpoint / "model.safetensors")
    made, numbers = {}, {}
    for name, weight in weights.items():
        if _LINEAR.fullmatch(name):
            tensors, numbers[name] = {"gptq": _gptq, "awq": _awq}[method](weight)
            stem = name.removesuffix(".weight")
            made |= {f"{stem}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
        else:
            made[name] = numbers[name] = weight
    save_file(made, packed / "model.safetensors", {"format": "pt"})
    save_file({name: one.contiguous() for name, one in numbers.items()}, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[method]}))
    return packed, plain


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def _pack(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Return numbers of four bits, eight along a dimension in each whole number of 32 bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    numbers = numbers.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = (numbers << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, dim)


def _grouped(weight: torch.Tensor) -> torch.Tensor:  # [out, in] -> [groups, rows of a group, out]
    return weight.T.unflatten(0, (-1, GROUP))


def _gptq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # [out, in]
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


def _awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # [out, in]
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
