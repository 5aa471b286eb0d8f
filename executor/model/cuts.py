"""Proves how a parallel linear layer's weights were cut.

The proof comes from the loader that vLLM recorded for the weights. A layer's class says how its own loader cuts a weight over
the tensor-parallel ranks. A model may give the weight another loader: Mamba 2 interleaves several parts, and copies one of
them to every rank, in a layer whose class says "one part in equal slices". The layer's values then have the shape that the
class says, and another order. So the class counts only where the loader is the class's own.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

# Most special first.
_KNOWN = (QKVParallelLinear, MergedColumnParallelLinear, ColumnParallelLinear, RowParallelLinear)
_LOADERS = ("weight_loader", "weight_loader_v2")


def why_not_known(layer: torch.nn.Module, tp_size: int) -> str:
    """Return why a layer's class does not tell what each rank holds; "" if it does.

    Args:
        layer: a column- or row-parallel layer, as it was loaded.
        tp_size: the number of ranks over which the model is spread.
    """
    known = next(kind for kind in _KNOWN if isinstance(layer, kind))
    if any(
        callable(value) and hasattr(known, name) for name, value in _of_subclasses(layer, known) if name != "__init__"
    ):
        return f"its class {type(layer).__name__} changes how vLLM's {known.__name__} loads or computes"
    if getattr(layer, "tp_size", None) != tp_size:
        return f"it is spread over {getattr(layer, 'tp_size', None)} ranks and the model over {tp_size}"
    weight = _largest(layer)
    if weight is None:
        return "vLLM has no record of how its weights were loaded"
    loader = inspect.unwrap(getattr(weight, "weight_loader", None) or _nothing)
    own = [vars(kind)[name] for kind in known.__mro__ for name in _LOADERS if name in vars(kind)]
    if not isinstance(loader, MethodType) or loader.__func__ not in own or getattr(weight, "is_sharded_weight", False):
        return "the model loads its weights in a way of its own"
    return ""


def _nothing() -> None:
    return None


def _of_subclasses(layer: torch.nn.Module, known: type) -> list[tuple[str, Any]]:
    """Return the definitions of a layer's classes that derive from vLLM's own class."""
    kinds = type(layer).__mro__
    return [item for kind in kinds[: kinds.index(known)] for item in vars(kind).items()]


def _largest(layer: torch.nn.Module) -> torch.Tensor | None:  # [out, in], without numbers
    """Return the record of a layer's weight before loading, without numbers.

    The weight is the layer's largest parameter.

    The layer itself may have lost it: kernels repack weights, and the repacked ones have no loader.
    """
    parameters, _ = get_layerwise_info(layer).restore_metadata
    return max(parameters.values(), key=torch.Tensor.numel, default=None)
