"""Indices of arrays as messages: the client writes an index, the server applies it.

An index has the meaning that it has for a torch tensor. It holds integers, slices with a positive step, `...`, `None`, and at
most one list of positions or of booleans. The dimension of such a list stays at its place, also beside integers, where numpy
would move it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from interpose.v1.value_pb2 import Index, IndexItem, IndexSlice, Positions, TensorView
from interpose.wire import arrays

MAX_CHAIN = 17  # 16, and the place of a tensor in a stack
MAX_ITEMS = 2 * arrays.MAX_DIMENSIONS


def index_of(subscript: object, shape: Sequence[int]) -> Index:
    """Return a subscript as a message.

    Args:
        subscript: the object between the brackets.
        shape: the shape of the indexed array.

    Raises:
        IndexError: it is no index, or none of an array of that shape.
    """
    parts = subscript if isinstance(subscript, tuple) else (subscript,)
    index = Index()
    used = sum(not (part is None or part is Ellipsis) for part in parts)
    dimension = 0
    for part in parts:
        if part is Ellipsis:
            dimension += max(0, len(shape) - used)
            index.items.add(ellipsis=True)
        elif part is None:
            index.items.add(new_axis=True)
        else:
            length = shape[dimension] if dimension < len(shape) else 0
            dimension += 1
            index.items.append(_item(part, length))
    return index


def _item(part: Any, length: int) -> IndexItem:
    if isinstance(part, slice):
        made = IndexSlice()
        for name in ("start", "stop", "step"):
            value = getattr(part, name)
            if value is not None:
                setattr(made, name, _integer(value))
        return IndexItem(slice=made)
    if arrays.is_tensor(part) or isinstance(part, np.ndarray):
        if len(part.shape) > 1:
            raise IndexError("a list of positions has one dimension; fetch() the value and index that")
        part = part.tolist()
    if isinstance(part, list | range):
        return IndexItem(positions=Positions(at=_positions(list(part), length)))
    return IndexItem(at=_integer(part))


def _positions(values: list[Any], length: int) -> list[int]:
    if values and all(isinstance(value, bool | np.bool_) for value in values):
        if len(values) != length:
            raise IndexError(f"{len(values)} booleans for a dimension of length {length}")
        return [position for position, wanted in enumerate(values) if wanted]
    return [_integer(value) for value in values]


def _integer(value: Any) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise IndexError(
            "a value on the server is indexed with integers, slices, `...`, None and one list of positions, not with "
            f"{value!r}; fetch() it and index that"
        ) from None
    if not -(1 << 63) <= number < 1 << 63:
        raise IndexError(f"the index {number} is out of range")
    return number


def check(view: TensorView) -> tuple[int, ...]:
    """Return the shape of a view.

    Raises:
        IndexError: an index does not fit, or the view is larger than its array.
    """
    try:
        arrays.check_layout(view.dtype, view.shape, _size(view))
        full = np.broadcast_to(np.zeros((), np.uint8), tuple(view.shape))
    except ValueError as error:
        raise IndexError(str(error)) from None
    return _apply(full, view, count_only=True).shape


def apply(data: np.ndarray, view: TensorView) -> np.ndarray:
    """Return a view of an array, with its elements as opaque bytes.

    Args:
        data: the bytes of the whole array, uint8 [bytes].
        view: the layout of the array, and the indices.

    Returns:
        [...] of the view's shape with unsigned integers of the elements' size; it shares memory with `data` where no list of
        positions is among the indices.

    Raises:
        IndexError: the bytes are not such an array, or an index does not fit.
    """
    try:
        arrays.check_layout(view.dtype, view.shape, data.nbytes)
    except ValueError as error:
        raise IndexError(str(error)) from None
    size = arrays.ITEM_BYTES[view.dtype]
    opaque = np.dtype(f"u{size}") if size <= 8 else np.dtype("c16")
    try:
        full = data.view(opaque).reshape(tuple(view.shape))
    except ValueError as error:  # an empty array with a length that numpy does not allow
        raise IndexError(str(error)) from None
    return _apply(full, view, count_only=False)


def _size(view: TensorView) -> int:
    size = arrays.ITEM_BYTES.get(view.dtype, 0)
    for length in view.shape:
        size *= length
    return size


def _apply(array: np.ndarray, view: TensorView, *, count_only: bool) -> np.ndarray:  # [...], any shape
    if len(view.indices) > MAX_CHAIN:
        raise IndexError(f"more than {MAX_CHAIN - 1} indices one after another; fetch() the value and index that")
    elements = array.size
    for index in view.indices:
        array = _indexed(array, index, elements, count_only)
    return array


def _indexed(array: np.ndarray, index: Index, elements: int, count_only: bool) -> np.ndarray:
    """Apply one index to an array of any shape: first basic parts, then a list of positions."""
    if len(index.items) > MAX_ITEMS:
        raise IndexError(f"an index of {len(index.items)} parts; at most {MAX_ITEMS} are taken")
    basic: list[Any] = []
    taken: list[int] = []
    listed = -1
    for item in index.items:
        kind = item.WhichOneof("kind")
        if kind == "at":
            basic.append(item.at)
        elif kind == "slice":
            basic.append(_slice(item.slice))
        elif kind == "ellipsis":
            basic.append(Ellipsis)
        elif kind == "new_axis":
            basic.append(None)
        elif kind == "positions":
            if listed >= 0:
                raise IndexError("two lists of positions in one index; use one after the other, or fetch() the value")
            listed, taken = len(basic), list(item.positions.at)
            basic.append(slice(None))
        else:
            raise IndexError("an empty part of an index")
    axis = _axis(array, basic, listed) if listed >= 0 else 0
    array = array[tuple(basic)]
    if array.ndim > arrays.MAX_DIMENSIONS:
        raise IndexError(f"an index that gives {array.ndim} dimensions; at most {arrays.MAX_DIMENSIONS} are taken")
    return array if listed < 0 else _take(array, taken, axis, elements, count_only)


def _axis(array: np.ndarray, basic: list[Any], listed: int) -> int:
    """Return the dimension of the result for the subscript at `listed`; the array has any shape."""
    axis = sum(not isinstance(part, int) and part is not Ellipsis for part in basic[:listed])
    if Ellipsis in basic[:listed]:
        used = sum(part is not None and part is not Ellipsis for part in basic)
        axis += array.ndim - used
    return axis


def _take(
    array: np.ndarray, taken: list[int], axis: int, elements: int, count_only: bool
) -> np.ndarray:  # [..., taken, ...]
    length = array.shape[axis]
    rest = array.size // length if length else 0
    if rest * len(taken) > elements:
        raise IndexError("a list of positions that gives more than the whole value; fetch() the value and index that")
    wrong = next((position for position in taken if not -length <= position < length), None)
    if wrong is not None:
        raise IndexError(f"position {wrong} is out of range for a dimension of length {length}")
    if count_only:
        shape = (*array.shape[:axis], len(taken), *array.shape[axis + 1 :])
        return np.broadcast_to(np.zeros((), array.dtype), shape)
    return np.take(array, taken, axis=axis)


def _slice(part: IndexSlice) -> slice:
    ends = [getattr(part, name) if part.HasField(name) else None for name in ("start", "stop", "step")]
    if ends[2] is not None and ends[2] <= 0:
        raise IndexError("a slice's step must be positive; fetch() the value and flip that")
    return slice(*ends)
