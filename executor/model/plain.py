"""Values without code of their own, which alone may take the place of the model's values."""

from __future__ import annotations

from typing import Any

import torch

from executor.core.errors import Refusal
from executor.model.items import made_here
from interpose.v1 import trace_pb2 as pb

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset({tuple, list, dict})


def check_plain(value: Any, location: str) -> None:
    """Refuse values with code of their own: the code would run where a change is written back.

    Raises:
        Refusal: INVALID_ARGUMENT, with the type and what to write instead.
    """
    kind = type(value)
    if kind in _PLAIN or value is None:
        return
    if kind in _CONTAINERS or made_here(kind):
        for item in value.values() if kind is dict else value:
            check_plain(item, location)
    elif issubclass(kind, torch.Tensor | tuple | list | dict):
        plain = "tensor: value.as_subclass(torch.Tensor)" if issubclass(kind, torch.Tensor) else "tuple, list or dict"
        raise Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            f"{location} was assigned a {kind.__name__}, whose own code the engine does not run; assign a plain {plain}",
            location=location,
        )
