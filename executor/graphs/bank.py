"""The vectors of all tenants' taps, on the device in one place.

A captured graph holds the bank's address, so the bank never grows: a vector that does not fit is refused, and its request runs in
another tier. A tenant has at most a share of the bank. A vector of the same bytes and tenant is there once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from executor.graphs.extents import Extents, Full


@dataclass(eq=False)
class _Held:
    """A vector in the bank.

    Attributes:
        key: the tenant and the digest of the contents.
        length: its number of elements.
        users: how many taps use it.
    """

    key: tuple[str, bytes]
    length: int
    users: int


@dataclass(frozen=True)
class Use:
    """A vector that was put into the bank once.

    Attributes:
        start: where it begins.
        held: what the bank notes of it as long as it is there.
    """

    start: int
    held: _Held


_SMALL = 64 << 10  # bytes of a vector on the device that is not looked for among the others


class Bank:
    """A flat tensor of vectors, in the dtype of the model.

    Args:
        elements: the size.
        dtype, device: of the bank.
        most_per_tenant: the elements that one tenant may have.

    Attributes:
        values: the tensor, [elements].
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, most_per_tenant: int) -> None:
        self.values = torch.zeros(elements, dtype=dtype, device=device)
        self._most = most_per_tenant
        self._extents = Extents("the bank of vectors", elements)
        self._held: dict[int, _Held] = {}
        self._known: dict[tuple[str, bytes], int] = {}
        self._tenants: dict[str, int] = {}
        self._serial = 0

    def add(self, tenant: str, vector: torch.Tensor, wide: bool = False) -> int:  # [...]
        """Put a vector into the bank; return where it begins, at a multiple of four bytes.

        It must be ordered before the next step's replay: the copy runs on the current stream.

        Args:
            tenant: whose share it takes.
            vector: the vector; it is rounded to the dtype of the bank.
            wide: whether it stays float32; its bytes then lie in the bank, which has a narrower dtype.

        Raises:
            Full: the bank or the tenant's share has no room.
        """
        flat, dtype = vector.detach().reshape(-1), self.values.dtype
        large = vector.numel() * vector.itemsize > _SMALL
        # To look at a vector on the device means to wait for the device, which pays for a large one alone.
        on = vector.device if vector.is_cuda and not large else torch.device("cpu")
        values = torch.empty(vector.numel(), dtype=torch.float32 if wide else dtype, device=on).copy_(flat).view(dtype)
        if on.type == "cpu":
            content = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).digest()
        else:
            self._serial += 1
            content = self._serial.to_bytes(8, "big")
        key = (tenant, content)
        found = self._known.get(key)
        if found is not None:
            self._held[found].users += 1
            return found
        even = 4 // dtype.itemsize
        length = -(-values.numel() // even) * even
        if self._tenants.get(tenant, 0) + length > self._most:
            raise Full(f"the share of {tenant or 'a tenant'} in the bank of vectors", length)
        start = self._extents.take(length)
        self.values[start : start + values.numel()].copy_(values)
        self._held[start] = _Held(key, length, 1)
        self._known[key] = start
        self._tenants[tenant] = self._tenants.get(tenant, 0) + length
        return start

    def use(self, start: int) -> Use:
        """Return what stands for the vector that begins at `start`, for `again`."""
        return Use(start, self._held[start])

    def again(self, use: Use) -> bool:
        """Note one more use of a vector; return whether the vector is still in the bank."""
        if self._held.get(use.start) is not use.held:
            return False
        use.held.users += 1
        return True

    def drop(self, start: int) -> None:
        """Give up one use of the vector that begins at `start`."""
        held = self._held[start]
        held.users -= 1
        if held.users:
            return
        tenant = held.key[0]
        self._extents.give(start)
        del self._held[start], self._known[held.key]
        self._tenants[tenant] -= held.length
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    @property
    def used(self) -> int:
        """The elements that are taken."""
        return self._extents.used
