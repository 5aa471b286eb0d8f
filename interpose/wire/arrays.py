"""Dense arrays of torch and numpy as little-endian bytes, and back, with their dtypes.

torch is imported only when a tensor arrives and must be rebuilt. To test whether an object is a tensor, torch need not be
imported: a tensor exists only in a process that has loaded torch.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.v1 import value_pb2

DType = value_pb2.DType

ITEM_BYTES: dict[int, int] = {
    value_pb2.DTYPE_BOOL: 1,
    value_pb2.DTYPE_UINT8: 1,
    value_pb2.DTYPE_INT8: 1,
    value_pb2.DTYPE_INT16: 2,
    value_pb2.DTYPE_INT32: 4,
    value_pb2.DTYPE_INT64: 8,
    value_pb2.DTYPE_UINT16: 2,
    value_pb2.DTYPE_UINT32: 4,
    value_pb2.DTYPE_UINT64: 8,
    value_pb2.DTYPE_FLOAT16: 2,
    value_pb2.DTYPE_BFLOAT16: 2,
    value_pb2.DTYPE_FLOAT32: 4,
    value_pb2.DTYPE_FLOAT64: 8,
    value_pb2.DTYPE_COMPLEX64: 8,
    value_pb2.DTYPE_COMPLEX128: 16,
    value_pb2.DTYPE_FLOAT8_E4M3FN: 1,
    value_pb2.DTYPE_FLOAT8_E5M2: 1,
}
MAX_DIMENSIONS = 32


class ArrayError(ValueError):
    """An array cannot become bytes, or bytes do not fit their dtype and shape."""


@dataclass(frozen=True)
class ShapeOnly:
    """The shape and dtype of a tensor that a scan saved, where torch is not installed.

    Attributes:
        shape: the lengths of the dimensions.
        dtype: the dtype of the elements, as a numpy dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes, if it had elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: int) -> str:
    """Return the name of a dtype in torch and numpy, e.g. "float32"."""
    if dtype not in ITEM_BYTES:
        raise ArrayError(f"unknown element type {dtype}")
    return value_pb2.DType.Name(dtype).removeprefix("DTYPE_").lower()


def loaded_torch() -> Any:
    """Return torch if this process has already imported it, else None."""
    return sys.modules.get("torch")


@functools.cache
def installed_torch() -> Any:
    """Import and return torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


@functools.cache
def numpy_dtype(dtype: int) -> np.dtype:
    """Return the little-endian numpy dtype; bfloat16 and float8 are dtypes of ml_dtypes."""
    name = dtype_name(dtype)
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name).newbyteorder("<")


def torch_dtype(dtype: int) -> Any:
    """Return the torch dtype, or None where torch is missing or has no such dtype."""
    torch = installed_torch()
    return None if torch is None else getattr(torch, dtype_name(dtype), None)


def dtype_of(dtype: object) -> int:
    """Return the wire's dtype of a torch or numpy dtype.

    Raises:
        ArrayError: the wire has no such dtype.
    """
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, np.dtype) else dtype.name
    number = value_pb2.DType.DESCRIPTOR.values_by_name.get(f"DTYPE_{name.upper()}")
    if number is None or not number.number:
        raise ArrayError(f"arrays of element type {name} cannot travel")
    return number.number


def is_tensor(obj: object) -> bool:
    """Whether an object is a torch tensor."""
    torch = loaded_torch()
    return torch is not None and isinstance(obj, getattr(torch, "Tensor", ()))


def is_dense(tensor: Any) -> bool:
    """Whether a torch tensor is neither sparse nor nested nor quantized."""
    torch = loaded_torch()
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def is_parameter(tensor: Any) -> bool:
    """Whether a torch tensor is a parameter of a module."""
    torch = loaded_torch()
    return torch is not None and isinstance(tensor, torch.nn.Parameter)


def with_gradients(tensor: Any, parameter: bool, requires_grad: bool) -> Any:
    """Return a new torch tensor as a parameter or with `requires_grad`.

    A numpy array is returned unchanged.

    Raises:
        ArrayError: the dtype has no gradients.
    """
    if not is_tensor(tensor) or not (parameter or requires_grad):
        return tensor
    torch = loaded_torch()
    try:
        return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_()
    except RuntimeError as error:
        raise ArrayError(f"no gradients for a tensor of {tensor.dtype}: {error}") from error


def tensor_bytes(tensor: Any) -> memoryview:
    """Return the elements of a torch tensor as contiguous bytes.

    The bytes share the tensor's memory where no copy is needed.
    """
    torch = loaded_torch()
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        raise ArrayError("a tensor without data (on the meta device) cannot travel")
    if not is_dense(tensor):
        nested = ("nested", "torch.nested.to_padded_tensor(x, 0.0)")
        quantized, sparse = ("quantized", "x.dequantize()"), (str(tensor.layout), "x.to_dense()")
        what, instead = nested if tensor.is_nested else quantized if tensor.is_quantized else sparse
        raise ArrayError(f"only dense tensors can travel, not {what} ones; write {instead}")
    with torch.no_grad():
        dense = tensor.detach().as_subclass(torch.Tensor)
        dense = dense.resolve_conj().resolve_neg().cpu().contiguous()
        # A tensor of one element is contiguous whatever its stride.
        return memoryview(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy())


def ndarray_bytes(array: np.ndarray) -> memoryview:
    """Return the elements of a numpy array of any shape as contiguous little-endian bytes.

    The bytes share the array's memory where no copy is needed.
    """
    little = numpy_dtype(dtype_of(array.dtype))
    contiguous = np.ascontiguousarray(array, dtype=little)
    return contiguous.reshape(-1).view(np.uint8).data


def check_layout(dtype: int, shape: Sequence[int], size: int) -> None:
    """Check that an array of a dtype and shape has `size` bytes.

    Raises:
        ArrayError: it has not.
    """
    if dtype not in ITEM_BYTES:
        raise ArrayError(f"unknown element type {dtype}")
    if len(shape) > MAX_DIMENSIONS:
        raise ArrayError(f"an array of {len(shape)} dimensions; at most {MAX_DIMENSIONS} are taken")
    elements = 1
    for length in shape:
        if length < 0:
            raise ArrayError(f"an array of negative length: {list(shape)}")
        elements *= length
    if elements * ITEM_BYTES[dtype] != size:
        raise ArrayError(
            f"{size} bytes are not a {dtype_name(dtype)} array of shape {list(shape)}, which has "
            f"{elements * ITEM_BYTES[dtype]}"
        )


def without_elements(dtype: int, shape: Sequence[int], *, torch_wanted: bool) -> Any:
    """Return an array without elements, of a shape and dtype.

    It is a torch tensor on the meta device, or a `ShapeOnly` where torch is not installed.
    """
    if len(shape) > MAX_DIMENSIONS or any(length < 0 for length in shape):
        raise ArrayError(f"no array has the shape {list(shape)[: MAX_DIMENSIONS + 1]}")
    kind = torch_dtype(dtype) if torch_wanted else None
    if kind is None:
        return ShapeOnly(tuple(shape), numpy_dtype(dtype))
    try:
        return installed_torch().empty(tuple(shape), dtype=kind, device="meta")
    except (RuntimeError, TypeError) as error:
        raise ArrayError(f"no array of shape {list(shape)} can be made: {error}") from error


def overwrite(target: Any, source: Any) -> None:
    """Copy the elements of a tensor or array into another of the same shape and dtype.

    Raises:
        ArrayError: shape, dtype or class differ.
    """
    if tuple(target.shape) != tuple(source.shape) or target.dtype != source.dtype or type(target) is not type(source):
        raise ArrayError(f"an array of shape {list(target.shape)} cannot take elements of shape {list(source.shape)}")
    target[...] = source


def from_bytes(dtype: int, shape: Sequence[int], data: Any, *, torch_wanted: bool) -> Any:
    """Return the array that little-endian bytes hold.

    It is a torch tensor if that is wanted and torch is installed, else a numpy array.

    A writable buffer is taken over, a read-only one is copied; either way the result can be written to.
    """
    flat = np.frombuffer(data, dtype=np.uint8) if len(memoryview(data)) else np.empty(0, dtype=np.uint8)
    check_layout(dtype, shape, flat.nbytes)
    if dtype == value_pb2.DTYPE_BOOL and flat.size and flat.max() > 1:
        raise ArrayError("an array of booleans with elements that are neither 0 nor 1")
    if not flat.flags.writeable:
        flat = flat.copy()
    try:
        kind = torch_dtype(dtype) if torch_wanted else None
        if kind is None:
            return flat.view(numpy_dtype(dtype)).reshape(tuple(shape))
        torch = installed_torch()
        if not flat.size:
            return torch.empty(tuple(shape), dtype=kind)
        return torch.from_numpy(flat).view(kind).reshape(tuple(shape))
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise ArrayError(f"no array of shape {list(shape)} can be made: {error}") from error
