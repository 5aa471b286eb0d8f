"""The operations of torch that a traced step may do where the block does not do them.

A plan computes both ways of a decision on a value. So an operation in a way gets values for which the block would not have called
it. It must not fail for any values, nor reach other memory by them, as an index does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_IN_WAYS = frozenset(
    """clone detach alias view reshape _unsafe_view slice select unsqueeze squeeze expand permute transpose t cat stack split
    split_with_sizes unbind flip roll copy fill zero full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full
    scalar_tensor arange lift_fresh_copy _to_copy getitem constant_pad_nd repeat diagonal _reshape_alias add sub mul div neg abs
    relu sqrt rsqrt eq ne lt le gt ge where clamp clamp_min clamp_max maximum minimum logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not masked_fill sign ceil floor round trunc isnan isinf rsub argmax argmin
    reciprocal any all mm bmm addmm mv dot baddbmm linear sum mean amax amin max min var std norm linalg_vector_norm exp log log1p
    expm1 sin cos tanh sigmoid silu gelu erf softplus pow square _softmax _log_softmax softmax log_softmax logsumexp
    native_layer_norm cumsum topk sort addcmul addcdiv lerp tril triu""".split()
)


def may_be_in_way(function: Any, args: tuple[Any, ...], named: Mapping[str, Any], written: list[int]) -> bool:
    """Return whether a traced step may do an operation where the block does not.

    Args:
        written: the numbers of the arguments that it writes to.
    """
    name = function._schema.name.partition("::")[2]
    if name.removesuffix("_") not in _IN_WAYS or torch.Tag.inplace_view in function.tags:
        return False
    if written and (written != [0] or not isinstance(args[0], torch.Tensor)):
        return False
    # Integers fail where they are divided by zero, and where they are raised to negative powers.
    return "rounding_mode" not in named and (not name.startswith("pow") or all(map(_is_float, args)))


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, int | float)
