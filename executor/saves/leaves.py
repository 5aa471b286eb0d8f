"""The tensors and arrays in saved containers, found before the containers are encoded.

Tensors of one layout become one stack, in whichever containers they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from executor.model.items import ListOutputs, Outputs, plainly
from interpose.contract.cache import Cache, Visit

_MAX_DEPTH = 100


def leaves(values: Iterable[Any], snapshot: Callable[[Any], Any]) -> list[Any]:
    """Return the tensors and arrays in containers, each once, in their order.

    A tensor that is itself one of `values` is left out.

    Args:
        values: the values of one message.
        snapshot: returns what a value is sent as.
    """
    values = [snapshot(value) for value in values]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for value in values:
        _look(value, snapshot, found, seen, 0)
    for value in values:
        found.pop(id(value), None)
    return list(found.values())


def _look(value: Any, snapshot: Callable[[Any], Any], found: dict[int, Any], seen: set[int], depth: int) -> None:
    inner = _inner(value)
    if inner is None or depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    tensor, array = torch.Tensor, numpy.ndarray
    for item in inner:
        sent = snapshot(item)
        kind = type(sent)
        if kind is tensor or kind is array:
            found[id(sent)] = sent
        else:
            _look(sent, snapshot, found, seen, depth + 1)


def _inner(value: Any) -> Iterable[Any] | None:
    """Return the items of a container, or None for a value of another kind."""
    kind = type(value)
    if kind is list or kind is tuple:
        items: Iterable[Any] = value
        return items
    if kind is dict or kind is OrderedDict:
        items = value.values()
        return items
    if kind is Cache or kind is Visit:
        return vars(value).values()
    return plainly(value) if isinstance(value, Outputs | ListOutputs) else None
