"""Many tensors of a list that are the rows of one tensor, while nothing looks at them.

A loop in the tables leaves thousands of small tensors in a list, and most are made to be sent at once. As one item of the list
they cost as much as one tensor. No code of the user's runs between the moment when the item is made and when it is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from interpose.wire import arrays
from interpose.wire.stacks import MAX_ARRAY_BYTES, MAX_STACK_BYTES


class Rows:
    """Some items of a list.

    Args:
        tensor: [items, ...], which nothing changes any more.

    Attributes:
        tensor: as given.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def cut(tensor: torch.Tensor) -> Iterator[Rows]:  # [items, ...]
    """Yield the rows of a tensor, as many together as a message may have in one stack."""
    for part in tensor.split(max(1, MAX_STACK_BYTES // tensor[0].nbytes)):
        yield Rows(part)


def can_be_sent(tensor: torch.Tensor) -> bool:  # [items, ...]
    """Return whether a message may have the rows of a tensor in a stack."""
    if not len(tensor) or not tensor.is_contiguous() or tensor.dtype.is_complex or tensor.device.type != "cpu":
        return False
    return 0 < tensor[0].nbytes <= MAX_ARRAY_BYTES and tensor.dim() <= arrays.MAX_DIMENSIONS
