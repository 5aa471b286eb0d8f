"""Keeps the large tensors of a tenant's traces on the device, for its later traces.

A tenant's traces often read the same weights, such as those of an autoencoder. The tensors are known by the digest of their
bytes, which a session has checked when they were uploaded. Each trace gets a copy of its own whose memory is shared until the
first write, to the copy or to a view of it (torch's copy on write). So a trace may change what it has, and no other trace sees
it. No tenant gets a tensor from another tenant's upload: that a digest is known would say what others use.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

LEAST_BYTES = 64 << 10  # of a tensor that is kept; a smaller one is made anew in less time
MOST_BYTES = 256 << 20  # of all tensors that are kept, on the device where the worker computes
SHARE = 0.5  # the part of these bytes that one tenant may have


@dataclass(frozen=True)
class _Kept:
    """A tensor that is kept.

    Attributes:
        tensor: nothing writes to it.
        number: no other tensor ever has it.
        memory: the address of its memory.
    """

    tensor: torch.Tensor
    number: int
    memory: int


class ConstantPool:
    """The large tensors of one worker's tenants.

    Where there is no room, the tensors that were used longest ago go.

    Args:
        most_bytes: of all tensors.
        share: the part of these that one tenant may have.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, share: float = SHARE) -> None:
        self._most = most_bytes
        self._most_of_one = int(most_bytes * share)
        self._kept: OrderedDict[tuple[str, Hashable], _Kept] = OrderedDict()
        self._by_memory: dict[int, int] = {}
        self._numbers = itertools.count(1)

    @property
    def used(self) -> int:
        """The bytes of all tensors that are kept."""
        return sum(one.tensor.nbytes for one in self._kept.values())

    def tensor(self, tenant: str, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # any shape
        """Return a tensor that the caller may change.

        Args:
            tenant: whose tensor it is.
            key: stands for the elements, the dtype and the shape.
            make: returns the tensor, if it is not here; no other code holds it.
        """
        known = self._kept.get((tenant, key))
        if known is None:
            try:
                made = make()
            except torch.OutOfMemoryError:
                if not self._kept:
                    raise
                self.clear()
                made = make()
            if not LEAST_BYTES <= made.nbytes <= self._most_of_one:
                return made
            known = self._keep(tenant, key, made)
        self._kept.move_to_end((tenant, key))
        return _copy(known.tensor)

    def _keep(self, tenant: str, key: Hashable, made: torch.Tensor) -> _Kept:  # any shape
        mine = [one for one in self._kept if one[0] == tenant]
        taken = sum(self._kept[one].tensor.nbytes for one in mine) + made.nbytes
        for one in mine:
            if taken > self._most_of_one:
                taken -= self._drop(one)
        used = self.used + made.nbytes
        while used > self._most:
            used -= self._drop(next(iter(self._kept)))
        # Memory of torch's own can be shared until a write; memory of numpy's cannot.
        tensor = made.clone() if made.device.type == "cpu" else made
        _copy(tensor)
        known = self._kept[tenant, key] = _Kept(tensor, next(self._numbers), _address(tensor))
        self._by_memory[known.memory] = known.number
        return known

    def _drop(self, key: tuple[str, Hashable]) -> int:
        """Forget a tensor; return its bytes."""
        known = self._kept.pop(key)
        del self._by_memory[known.memory]
        return int(known.tensor.nbytes)

    def clear(self) -> None:
        """Forget every tensor; the copies stay."""
        self._kept.clear()
        self._by_memory.clear()

    def origin(self, tensor: torch.Tensor) -> Hashable:  # any shape
        """Return what stands for the elements of a tensor; None if nothing does.

        No element is looked at. Two tensors have the same origin only if they are unchanged parts of one tensor that is kept,
        laid out alike. The address says so: memory that is shared until a write is nowhere else while the tensor is kept.
        """
        if not self._by_memory or not torch._C._is_cow_tensor(tensor):
            return None
        number = self._by_memory.get(_address(tensor))
        if number is None or tensor.is_conj() or tensor.is_neg():
            return None
        return number, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _address(tensor: torch.Tensor) -> int:  # any shape
    """Return the address of a tensor's memory; unlike `data_ptr`, it is no write."""
    return int(torch._C._data_address(tensor))


def _copy(tensor: torch.Tensor) -> torch.Tensor:  # any shape
    """Return a copy that shares the tensor's memory until either is written to."""
    with torch.inference_mode(False), torch.no_grad():
        try:
            return torch._lazy_clone(tensor)
        except RuntimeError:  # of memory that cannot be shared so
            return tensor.clone()
