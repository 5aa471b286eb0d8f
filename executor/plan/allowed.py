"""The operations of a plan from outside of the worker, and what their arguments may be.

The list is explicit. No operation in it writes to its arguments, draws random numbers, gives a view of other memory than its
argument's, takes a value out of a tensor, or has a result whose shape depends on values. Two kinds of arguments need more than a
type, because kernels do not check them on every device: an index must be a tensor of the plan's own whose elements were looked at
(`INDICES`), and integers are not divided (`FLOATS`).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

# By overload.
_NAMES: dict[str, str] = {
    "default": """abs acos alias amax amin argmax argmin asin atan bitwise_not bmm cat ceil clamp clamp_max clamp_min clone
    constant_pad_nd copy cos cosh cumsum detach diagonal dot erf erfc exp exp2 expand expm1 flip floor full full_like gelu
    hardtanh index_put index_select isfinite isinf isnan leaky_relu lift_fresh_copy linalg_vector_norm log log10 log1p log2
    logical_and logical_not logical_or logical_xor logsumexp max maximum mean min minimum mish mm mv
    native_layer_norm neg new_full new_ones new_zeros ones ones_like permute prod reciprocal relu repeat roll round rsqrt
    scalar_tensor select_scatter sigmoid sign silu sin sinh slice_scatter softplus split_with_sizes sqrt squeeze stack sum t
    tan tanh topk tril triu trunc unsqueeze view zeros zeros_like _log_softmax _softmax _to_copy _unsafe_view
    addmm addmv baddbmm elu hardsigmoid hardswish all any arange sgn square""",
    "Tensor": """add bitwise_and bitwise_or bitwise_xor clamp clamp_max clamp_min div eq fmod ge gt index le lerp lt
    masked_fill mul ne remainder rsub slice split sub""",
    "Scalar": """add bitwise_and bitwise_or bitwise_xor div eq fmod ge gt le lerp lt masked_fill mul ne remainder rsub sub
    pow""",
    "Tensor_mode": "div",
    "Scalar_mode": "div",
    "Tensor_Scalar": "pow",
    "Tensor_Tensor": "pow",
    "self": "where",
    "ScalarSelf": "where",
    "ScalarOther": "where",
    "int": "select transpose unbind",
    "dim": "all any max min mean squeeze",
    "dims": "all any squeeze",
    "dim_IntList": "sum",
    "dim_int": "prod",
    "correction": "std var std_mean var_mean",
    "ScalarOpt_dim": "norm",
    "start": "arange",
    "start_step": "arange",
    "stable": "sort",
}
_ALSO = ("sort.default", "atan2.default", "norm.Scalar")

# Where an operation takes indices; each is a tensor of the plan's own, and in range.
INDICES = {"index.Tensor": 1, "index_put.default": 1, "index_select.default": 2}
# The processor traps where it divides certain integers.
FLOATS = frozenset(
    f"{name}.{kind}" for name in ("div", "fmod", "remainder", "pow") for kind in ("Tensor", "Scalar", "Tensor_mode")
) | {"div.Scalar_mode", "pow.Tensor_Scalar", "pow.Tensor_Tensor"}
_TRUE_DIVISION = frozenset({"div.Tensor", "div.Scalar"})

GETITEM = "getitem"
DTYPES = {
    str(dtype).partition(".")[2]: dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
FORMATS = {"contiguous": torch.contiguous_format, "preserve": torch.preserve_format}
# Arguments that say where a tensor lies; the worker has its own answers.
DEVICE_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "non_blocking"})
_UNFIT = (
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.nondeterministic_bitwise,
    torch.Tag.inplace_view,
)


@functools.cache
def operations() -> dict[str, Any]:
    """Return the operations by their names, such as `add.Tensor`."""
    found: dict[str, Any] = {GETITEM: operator.getitem}
    names = [f"{name}.{kind}" for kind, many in _NAMES.items() for name in many.split()]
    for name in (*names, *_ALSO):
        packet, _, kind = name.partition(".")
        made = getattr(getattr(torch.ops.aten, packet, None), kind, None)
        if made is not None and not _unfit(made):
            found[name] = made
    return found


def _unfit(made: Any) -> bool:
    """Return whether an operation is none for a plan, whatever the list says."""
    return bool(made._schema.is_mutable) or any(tag in made.tags for tag in _UNFIT)


@functools.cache
def names() -> dict[Any, str]:
    """Return the names of the operations."""
    return {made: name for name, made in operations().items()}


def divides_integers(name: str, given: Any) -> bool:
    """Return whether an operation would divide integers, or raise them to a power.

    Args:
        name: the operation.
        given: the dtypes of its tensors.
    """
    return name in FLOATS - _TRUE_DIVISION and not any(dtype.is_floating_point for dtype in given)
