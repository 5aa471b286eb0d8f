"""Values that one pipeline stage hands to the others: served values and module outputs.

Only the block's own rows travel, whole over the tensor-parallel ranks, as plain structures and tensors.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

from executor.core.errors import Refusal
from executor.model.items import Opaque, Path, kind_of, made_of
from executor.model.layouts import WHOLE
from executor.model.values import Fixed, Served

Message = dict[str, Any]


class _AllRows:
    """Every row of a tensor; the rows of other requests stayed on the stage that has them."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:  # [rows, ...]
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:  # any shape
        return True

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:  # [rows, ...]
        tensor.copy_(mine)


class RemoteServed(Served):
    """A location of another stage.

    The block may read and change the value as it may on that stage, and that stage applies the changes.

    Args:
        location: the location's name.
        value: what the block was given on that stage.
    """

    def __init__(self, location: str, value: Any) -> None:
        super().__init__(location, value, _AllRows(), lambda path: WHOLE)

    def _expose(self, value: Any, path: Path) -> Any:
        return value if isinstance(value, Opaque) else super()._expose(value, path)

    def settle(self, current: Any) -> Any:
        super().settle(self._original)
        return current


def pack_served(served: Served) -> Message:
    """Return what another stage needs to give its copy of the block the same value."""
    return {**pack(served.value), "fixed": isinstance(served, Fixed)}


def unpack_served(message: Message, location: str) -> Served:
    """Return a served value on a stage that does not have the location."""
    value = unpack(message)
    return Fixed(location, value) if message["fixed"] else RemoteServed(location, value)


def pack(value: Any) -> Message:
    """Return a value as a flat message.

    A tensor that occurs twice in the value is one tensor on the receiving stage too.
    """
    tensors: list[torch.Tensor] = []
    shape = _pack(value, tensors)
    return {"shape": shape, **{str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}}


def unpack(message: Message) -> Any:
    """Return the value of a message; a tuple comes back as a tuple."""
    return _unpack(message["shape"], message)


def pack_error(error: Exception) -> Message:
    """Return an error as a message."""
    if isinstance(error, Refusal):
        return {"refusal": (int(error.code), error.message, error.location, error.suggestions)}
    return {"error": (type(error).__name__, str(error))}


def unpack_error(message: Message) -> Exception | None:
    """Return the error of a message with its original type, or None for a value."""
    if "refusal" in message:
        code, text, location, suggestions = message["refusal"]
        return Refusal(code, text, location=location, suggestions=suggestions)
    if "error" in message:
        name, text = message["error"]
        known = getattr(builtins, name, None)
        kind = known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError
        try:
            return kind(text)
        except TypeError:  # The type's constructor needs more than a text.
            return RuntimeError(text)
    return None


def _pack(value: Any, tensors: list[torch.Tensor]) -> tuple[str, Any]:  # any shape
    if isinstance(value, torch.Tensor):
        known = next((i for i, tensor in enumerate(tensors) if tensor is value), None)
        if known is None:
            known = len(tensors)
            tensors.append(value)
        return "tensor", known
    if isinstance(value, Opaque):
        return "opaque", object.__getattribute__(value, "_what")
    if isinstance(value, tuple | list):
        return "items", (kind_of(value), [_pack(item, tensors) for item in value])
    if isinstance(value, dict):
        return "names", {name: _pack(item, tensors) for name, item in value.items()}
    return "plain", value


def _unpack(shape: tuple[str, Any], message: Message) -> Any:
    kind, content = shape
    if kind == "tensor":
        return message[str(content)]
    if kind == "opaque":
        return Opaque(content)
    if kind == "items":
        kind, items = content
        return made_of(kind, [_unpack(item, message) for item in items])
    if kind == "names":
        return {name: _unpack(item, message) for name, item in content.items()}
    return content
