"""A location's value as plain values: its containers, and the numbers of its tensors.

The tensors of a served value have numbers in the order of `Served.given`. A block's process gets the containers with the numbers
and, beside them, the tensors. It sends the containers back if the block has put anything else in the place of a tensor.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from executor.model.items import Opaque, kind_of, made_of
from executor.sandbox.codec import Malformed

_PLAIN = (bool, int, float, str)


def describe(value: Any, tensors: Sequence[torch.Tensor]) -> Any:  # tensors: [rows, ...] each
    """Return the containers of a value with the numbers of its tensors.

    Args:
        value: the value. A tensor that is none of `tensors` stands for itself.
        tensors: the tensors that have numbers.
    """
    if isinstance(value, torch.Tensor):
        number = next((number for number, one in enumerate(tensors) if one is value), None)
        return ("new", value) if number is None else ("leaf", number)
    if isinstance(value, tuple | list):
        items = [describe(item, tensors) for item in value]
        kind = kind_of(value)
        fields = getattr(kind, "_fields", None)
        if fields is not None:
            return "named", kind.__name__, list(fields), items
        return ("list" if isinstance(value, list) else "tuple"), items
    if isinstance(value, dict):
        return "dict", {name: describe(item, tensors) for name, item in value.items()}
    if value is None or type(value) in _PLAIN:
        return "plain", value
    return "opaque", object.__getattribute__(value, "_what") if isinstance(value, Opaque) else type(value).__name__


def tensors_in(value: Any) -> list[torch.Tensor]:  # [rows, ...] each
    """Return the tensors of a served value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def replaces(told: Any) -> bool:
    """Return whether a description has a tensor without a number."""
    if isinstance(told, tuple):
        return told[:1] == ("new",) or any(map(replaces, told))
    items = told.values() if isinstance(told, dict) else told if isinstance(told, list) else ()
    return any(map(replaces, items))


def build(told: Any, tensors: Sequence[torch.Tensor]) -> Any:  # tensors: [rows, ...] each
    """Return the value that `describe` described, from what the worker sent."""
    tag = told[0]
    if tag in ("leaf", "new"):
        return tensors[told[1]] if tag == "leaf" else told[1]
    if tag == "named":
        return _named(told[1], tuple(told[2]))(*[build(item, tensors) for item in told[3]])
    if tag in ("list", "tuple"):
        items = [build(item, tensors) for item in told[1]]
        return items if tag == "list" else tuple(items)
    if tag == "dict":
        return {name: build(item, tensors) for name, item in told[1].items()}
    return told[1] if tag == "plain" else Opaque(told[1])


@functools.cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


def rebuild(told: Any, original: Any, tensors: Sequence[torch.Tensor]) -> Any:  # tensors: [rows, ...] each
    """Return the value that a block's process says is in the place of a served value.

    Whether it fits is checked where it is assigned.

    Args:
        told: what the process sent.
        original: the served value.
        tensors: the tensors of the served value.

    Raises:
        Malformed: it is no such value.
    """
    if not isinstance(told, tuple) or len(told) not in (2, 4) or not isinstance(told[0], str):
        raise Malformed("no containers of a value")
    tag, content = told[0], told[-1]
    if tag == "leaf" and type(content) is int and 0 <= content < len(tensors):
        return tensors[content]
    if tag == "new" and isinstance(content, torch.Tensor):
        return content
    if tag == "plain" and (content is None or type(content) in _PLAIN):
        return original if repr(content) == repr(original) else content
    if tag == "opaque" and isinstance(original, Opaque):
        return original
    listed = isinstance(content, list) and isinstance(original, tuple | list) and len(content) == len(original)
    if tag in ("named", "list", "tuple") and listed:
        items = [rebuild(*pair, tensors) for pair in zip(content, original, strict=True)]
        return made_of(kind_of(original), items)
    if tag == "dict" and isinstance(content, dict) and isinstance(original, dict) and set(content) == set(original):
        return {name: rebuild(content[name], item, tensors) for name, item in original.items()}
    raise Malformed(f"a {tag} in the place of a {type(original).__name__}")
