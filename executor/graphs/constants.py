"""Large constants of programs, on the device.

Requests whose constants have equal contents share one copy. Contents are compared bit for bit, after a sum of their bits. So a
tenant cannot reach another constant than the tenant's own. Where the origin of a tensor is known, no contents are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

_MOST_ORIGINS = 256  # of one constant


@dataclass(eq=False)
class Constant:
    """A constant on the device.

    Attributes:
        number: stands for the contents, the dtype, the shape and the layout; no other constant ever has it.
        tensor: the copy.
        total: the sum of its bits.
        users: how many programs hold it.
        origins: of tensors with its contents.
    """

    number: int
    tensor: torch.Tensor
    total: int
    users: int = 0
    origins: set[Hashable] = field(default_factory=set)

    @property
    def size(self) -> int:
        """The bytes of the copy."""
        return self.tensor.numel() * self.tensor.itemsize


class Constants:
    """The shared constants of one worker.

    Args:
        origin: returns what stands for a tensor's elements, as of `ConstantPool.origin`; None if nothing does.
    """

    def __init__(self, origin: Callable[[torch.Tensor], Hashable] = lambda tensor: None) -> None:
        self._origin = origin
        self._by_origin: dict[Hashable, Constant] = {}
        self._held: dict[int, Constant] = {}
        self._last = 0

    def find(self, tensor: torch.Tensor) -> Constant | None:  # any shape
        """Return the constant with the contents of a tensor.

        It waits for the device if the tensor's origin is new.
        """
        origin = self._origin(tensor)
        known = self._by_origin.get(origin) if origin is not None else None
        if known is not None:
            return known
        found = self._alike(tensor)
        if found is not None:
            self._note(found, origin)
        return found

    def _note(self, constant: Constant, origin: Hashable) -> None:
        if origin is not None and len(constant.origins) < _MOST_ORIGINS:
            constant.origins.add(origin)
            self._by_origin[origin] = constant

    def _alike(self, tensor: torch.Tensor) -> Constant | None:  # any shape
        alike = [one for one in self._held.values() if _form(one.tensor) == _form(tensor)]
        if not alike:
            return None
        raw = _bits(tensor)
        total = _total(raw)
        return next((one for one in alike if one.total == total and torch.equal(_bits(one.tensor), raw)), None)

    def add(self, tensor: torch.Tensor) -> Constant:  # any shape
        """Keep a copy of a tensor, with no user yet."""
        with torch.inference_mode(False), torch.no_grad():
            copy = torch.empty_strided(tensor.shape, _layout(tensor), dtype=tensor.dtype, device=tensor.device)
            copy.copy_(tensor)
        self._last += 1
        made = self._held[self._last] = Constant(self._last, copy, _total(_bits(copy)))
        self._note(made, self._origin(tensor))
        return made

    def drop(self, constant: Constant) -> None:
        """Give up one use of a constant; the last use frees it."""
        constant.users -= 1
        if constant.users < 1:
            del self._held[constant.number]
            for origin in constant.origins:
                del self._by_origin[origin]

    @property
    def used(self) -> int:
        """The bytes of all constants."""
        return sum(one.size for one in self._held.values())


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:  # any shape
    """Return the strides of a tensor without holes; others are laid out row by row."""
    return torch.empty_like(tensor, device="meta").stride()


def _form(tensor: torch.Tensor) -> tuple[object, ...]:  # any shape
    return tensor.dtype, tensor.device, tuple(tensor.shape), _layout(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:  # any shape -> flat
    """Return the bits of a tensor's elements, in the order of its layout."""
    layout = _layout(tensor)
    order = sorted(range(tensor.dim()), key=lambda dim: (-layout[dim], dim))
    flat = tensor.detach().permute(order).contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])


def _total(bits: torch.Tensor) -> int:  # [elements]
    return int(bits.sum(dtype=torch.int64))
