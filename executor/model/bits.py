"""Contents of tensors, bit for bit: a NaN is equal to itself, and 0.0 is not equal to -0.0."""

from __future__ import annotations

import torch

_SPREAD = 0x9E3779B97F4A7C1 | 1  # odd, so that no multiple of a difference vanishes but by chance
_PART = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:  # any shape
    """Return whether two tensors have the same contents, bit for bit."""
    return torch.equal(bits(one), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:  # any shape
    """Return a tensor's contents as numbers that are equal where the bits are."""
    numbers = _BITS.get(tensor.element_size())
    return tensor if numbers is None else tensor.view(numbers)


def digest(tensor: torch.Tensor) -> torch.Tensor:  # any shape; returns a scalar, int64
    """Return a number on the tensor's device that differs if contents or their order differ."""
    with torch.inference_mode(False), torch.no_grad():
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1).contiguous()
        numbers = bits(flat).to(torch.int64)
        weights = torch.arange(1, numbers.numel() + 1, device=numbers.device, dtype=torch.int64)
        return (numbers * (weights * _SPREAD)).sum()


def digests(tensor: torch.Tensor) -> list[int]:  # any shape
    """Return digests of a tensor's parts, of up to a million elements each.

    A digest takes several times the memory of what it stands for. Waits for the device once.
    """
    with torch.inference_mode(False), torch.no_grad():
        parts = tensor.detach().reshape(-1).split(_PART)
        found: list[int] = torch.stack([digest(part) for part in parts]).tolist()
        return found
