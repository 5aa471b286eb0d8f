"""Tensors with a shape and a dtype and no elements, as a scan gives them to its block.

They are torch's fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from interpose.v1 import trace_pb2 as pb


def is_fake(value: object) -> bool:
    """Return whether a value is a tensor without elements."""
    return isinstance(value, FakeTensor)


def explained(failure: pb.Failure) -> pb.Failure:
    """Return the failure of a scan's block, with a better message if elements are missing."""
    if needs_elements(failure):
        failure.code = pb.ERROR_CODE_INVALID_ARGUMENT
        failure.message = (
            f"a scan has shapes and no elements, and this depends on elements; use model.trace(prompt) for it "
            f"({failure.message})"
        )
    return failure


def needs_elements(failure: pb.Failure) -> bool:
    """Return whether a block failed because a scan has no elements."""
    return "_subclasses" in failure.exception_type or "FakeTensor" in failure.message


class Fakes:
    """Makes the tensors of one scan."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:  # any shape
        """Return a tensor with the shape and dtype of another tensor, and no elements."""
        with torch.inference_mode(False), torch.no_grad(), self._mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # [*shape]
        """Return a tensor with a shape and a dtype, and no elements."""
        with torch.inference_mode(False), torch.no_grad(), self._mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def of(self, value: Any) -> Any:
        """Return a value with fake tensors in the places of its tensors."""
        return _mapped(value, self.like)

    @staticmethod
    def real(value: Any) -> Any:
        """Return a value with zeros for its fake tensors, so that a module can run on it."""

        def zeros(tensor: torch.Tensor) -> torch.Tensor:  # any shape
            if not isinstance(tensor, FakeTensor):
                return tensor
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        return _mapped(value, zeros)


def _mapped(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # any shape
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, list | tuple):
        items = [_mapped(item, make) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: _mapped(item, make) for name, item in value.items()}
    return value
