"""Stacks: many arrays of one type as one block of bytes, and the arrays of such a block.

The arrays of a stack have the same library, dtype and device, and dimensions that are equal but for the first. Each array that
comes out of a stack has elements of its own: a write to an array reaches no other, and pickling an array pickles no other. The
memory of a stack stays in use as long as any of its arrays is.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from interpose.v1.value_pb2 import (
    ARRAY_LIBRARY_NUMPY,
    ARRAY_LIBRARY_TORCH,
    DTYPE_BOOL,
    Index,
    IndexItem,
    IndexSlice,
    Objects,
    RemoteTensor,
    Stack,
    Tensor,
    TensorView,
    Value,
)
from interpose.wire import arrays
from interpose.wire.arrays import ArrayError
from interpose.wire.walk import parts

MAX_ARRAY_BYTES = 4 << 20  # bytes of an array in a stack; the cost of a larger array is that of its bytes
MAX_STACK_BYTES = 64 << 20  # bytes of a stack, which are in memory twice while the stack is made
_UNITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def groups(members: Iterable[Any], most_bytes: int | None = None) -> Iterator[list[Any]]:
    """Group arrays that can be in one stack; arrays without such company are left out.

    Args:
        members: torch tensors and numpy arrays, each once.
        most_bytes: the bytes of a group; None: those of a stack, `MAX_STACK_BYTES`.

    Yields:
        Two or more arrays, in their order.
    """
    most_bytes = MAX_STACK_BYTES if most_bytes is None else most_bytes
    members = list(members)
    found: dict[Hashable, list[Any]] = {}
    for member, key in zip(members, _keys(members), strict=True):
        if key is not None:
            found.setdefault(key, []).append(member)
    for group in found.values():
        first = taken = 0
        for i, size in enumerate(map(_size, group)):
            if taken + size > most_bytes:
                if i - first > 1:
                    yield group[first:i]
                first, taken = i, 0
            taken += size
        if len(group) - first > 1:
            yield group[first:]


_size = operator.attrgetter("nbytes")
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")


def _keys(members: list[Any]) -> list[Hashable]:
    """Return the key of each array, as of `_key`; tensors of one form are looked at together."""
    torch = arrays.loaded_torch()
    if torch is None or set(map(type, members)) != {torch.Tensor}:
        return [_key(member, torch) for member in members]
    tensor, layout, device = torch.Tensor, operator.attrgetter("layout"), operator.attrgetter("device")
    get: list[Callable[[Any], Hashable]] = [_shape, _dtype, layout, device, tensor.is_conj, tensor.is_neg]
    try:
        forms = list(zip(*(map(one, members) for one in get), strict=True))
    except RuntimeError:  # a nested tensor has no shape
        return [_key(member, torch) for member in members]
    keys = {form: _key(member, torch) for form, member in dict(zip(forms, members, strict=True)).items()}
    return [keys[form] for form in forms]


def _key(array: Any, torch: Any) -> Hashable:
    """Return the dtype and shape that a stack's arrays share, None for an array in no stack."""
    is_torch = torch is not None and type(array) is torch.Tensor
    if is_torch and (not arrays.is_dense(array) or array.is_meta or array.is_conj() or array.is_neg()):
        return None
    if not 0 < array.nbytes <= MAX_ARRAY_BYTES or array.ndim >= arrays.MAX_DIMENSIONS:
        return None
    tail = array.shape[1:] if array.ndim else None
    if is_torch:
        return array.dtype, tail, array.device
    return (np.ndarray, array.dtype, tail) if type(array) is np.ndarray and array.dtype.isnative else None


def packed(members: Sequence[Any]) -> memoryview:
    """Return the elements of a group's arrays as new bytes, one array after the other.

    Raises:
        ArrayError, RuntimeError, TypeError: the arrays cannot be put together.
    """
    first = members[0]
    if isinstance(first, np.ndarray):
        joined = np.concatenate(members) if first.ndim else np.stack(members)
        return np.ascontiguousarray(joined).reshape(-1).view(np.uint8).data
    torch = arrays.loaded_torch()
    with torch.no_grad():
        one = torch.cat(members) if first.ndim else torch.stack(members)
        return arrays.tensor_bytes(one)


def joined(members: Sequence[Any]) -> Any:
    """Return a tensor [arrays, ...] whose rows are some arrays, in the memory where these are.

    It is None if the arrays do not lie one after the other in one memory, or do not have one shape.
    """
    torch = arrays.loaded_torch()
    if torch is None or len(members) < 2 or type(members[0]) is not torch.Tensor:
        return None
    first, tensor = members[0], torch.Tensor
    if set(map(type, members)) != {tensor} or first.dtype.is_complex or _key(first, torch) is None:
        return None
    try:
        start, size = first.data_ptr(), first.nbytes
        if members[1].data_ptr() - start != size:
            return None
        addresses = list(range(start, start + size * len(members), size))
        alike = all(
            list(map(get, members)) == [get(first)] * len(members)
            for get in (_shape, _dtype, tensor.is_contiguous, *([tensor.is_neg] if first.numel() == 1 else []))
        )
        # A negated tensor that is contiguous all the same has one element.
        if not (alike and first.is_contiguous()) or list(map(tensor.data_ptr, members)) != addresses:
            return None
        with torch.no_grad():
            # It fails if the memory of the first array ends before the last array.
            row = first.detach()
            return row.as_strided((len(members), *row.shape), (row.numel(), *row.stride()))
    except RuntimeError:  # an array without memory
        return None


def layout(members: Sequence[Any]) -> Stack:
    """Return the message of a group without its bytes.

    Raises:
        ArrayError: the wire has no such dtype.
    """
    first = members[0]
    is_numpy = isinstance(first, np.ndarray)
    stack = Stack(
        dtype=arrays.dtype_of(first.dtype),  # type: ignore[arg-type]
        library=ARRAY_LIBRARY_NUMPY if is_numpy else ARRAY_LIBRARY_TORCH,
        count=len(members),
    )
    shapes = list(map(_shape, members))
    if shapes.count(first.shape) < len(shapes):
        rows = [shape[0] for shape in shapes]
        stack.shape.extend(first.shape[1:])
        stack.rows.extend(rows)
    else:
        stack.shape.extend(first.shape)
    return stack


def layout_of(rows: Any) -> Stack:
    """Return the message of the rows of a tensor [arrays, ...], without its bytes.

    Raises:
        ArrayError: the wire has no such dtype.
    """
    count, *shape = rows.shape
    dtype: Any = arrays.dtype_of(rows.dtype)
    return Stack(dtype=dtype, library=ARRAY_LIBRARY_TORCH, count=count, shape=shape)


def check(stack: Stack, size: int) -> None:
    """Check that a stack has `size` bytes, and no array without elements.

    So a stack has at most as many arrays as bytes.

    Raises:
        ArrayError: it has not.
    """
    if stack.dtype not in arrays.ITEM_BYTES:
        raise ArrayError(f"unknown element type {stack.dtype}")
    if len(stack.shape) >= arrays.MAX_DIMENSIONS:
        raise ArrayError(f"a stack of arrays of {len(stack.shape)} dimensions")
    if not stack.count or any(length < 1 for length in itertools.chain(stack.shape, stack.rows)):
        raise ArrayError(
            f"a stack of {stack.count} arrays with lengths {list(stack.shape)} has arrays without elements"
        )
    if stack.rows and len(stack.rows) != stack.count:
        raise ArrayError(f"a stack of {stack.count} arrays with the rows of {len(stack.rows)}")
    each = math.prod(stack.shape) * arrays.ITEM_BYTES[stack.dtype]
    meant = each * (sum(stack.rows) if stack.rows else stack.count)
    if meant != size:
        raise ArrayError(f"{size} bytes are not a stack of {stack.count} arrays, which has {meant}")


def apart(stack: Stack, data: Any, *, torch_wanted: bool) -> list[Any]:
    """Return the arrays of a stack: torch tensors if wanted and installed, else numpy arrays.

    A writable buffer is taken over, a read-only buffer is copied.

    Raises:
        ArrayError: the bytes are not this stack's.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    check(stack, flat.nbytes)
    if stack.dtype == DTYPE_BOOL and flat.max() > 1:
        raise ArrayError("an array of booleans with elements that are neither 0 nor 1")
    if not flat.flags.writeable:
        flat = flat.copy()
    wanted = torch_wanted and stack.library != ARRAY_LIBRARY_NUMPY
    kind = arrays.torch_dtype(stack.dtype) if wanted else None
    try:
        if kind is None:
            return _parts(flat.view(arrays.numpy_dtype(stack.dtype)), stack)
        # A tensor made of a numpy array has a storage of its own, which is as large as the array.
        from_numpy = arrays.installed_torch().from_numpy
        unit = _UNITS.get(arrays.ITEM_BYTES[stack.dtype])
        elements = flat.view(np.complex128 if unit is None else unit)
        return [from_numpy(array).view(kind) for array in _parts(elements, stack)]
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise ArrayError(f"the arrays of a stack cannot be made: {error}") from error


def _parts(elements: np.ndarray, stack: Stack) -> list[np.ndarray]:
    """Return the arrays of a stack as views of its elements [n]."""
    if not stack.rows:
        if not stack.shape:
            return [elements[i : i + 1].reshape(()) for i in range(stack.count)]
        return list(elements.reshape(stack.count, *stack.shape))
    every = elements.reshape(-1, *stack.shape)
    return [every[start:stop] for start, stop in _spans(stack)]


def _spans(stack: Stack) -> Iterator[tuple[int, int]]:
    """Iterate over the first row of each array, and the row after its last."""
    return itertools.pairwise(itertools.accumulate(stack.rows, initial=0))


def views(stack: Stack) -> Iterator[TensorView]:
    """Return for each array of a checked stack its place in the stack's bytes."""
    length = sum(stack.rows) if stack.rows else stack.count
    all_bytes = TensorView(dtype=stack.dtype, shape=[length, *stack.shape])
    if stack.rows:
        items = (IndexItem(slice=IndexSlice(start=start, stop=stop)) for start, stop in _spans(stack))
    else:
        items = (IndexItem(at=i) for i in range(stack.count))
    for item in items:
        view = TensorView()
        view.CopyFrom(all_bytes)
        view.indices.append(Index(items=[item]))
        yield view


def without(objects: Objects) -> Objects:
    """Return a table without stacks: each of their arrays becomes an entry at the table's end.

    Other entries keep their index. An array whose bytes are in a blob becomes a `RemoteTensor`.

    Raises:
        ArrayError: a stack is malformed.
    """
    if not any(value.WhichOneof("kind") == "stack" for value in objects.values):
        return objects
    made = Objects()
    made.CopyFrom(objects)
    firsts: dict[int, int] = {}
    for index, value in enumerate(objects.values):
        if value.WhichOneof("kind") == "stack":
            firsts[index] = len(made.values)
            made.values.extend(_entries(value.stack))
            made.values[index].none = True
    todo = list(made.values)
    while todo:
        value = todo.pop()
        _replace_slices(value, firsts)
        todo.extend(parts(value))
    return made


def _entries(stack: Stack) -> Iterator[Value]:
    if stack.WhichOneof("payload") == "blob":
        check(stack, stack.blob.size)
        for view in views(stack):
            yield Value(remote=RemoteTensor(blob_id=stack.blob.id, view=view, library=stack.library))
        return
    for array in apart(stack, stack.data, torch_wanted=False):
        tensor = Tensor(dtype=stack.dtype, shape=array.shape, library=stack.library, data=array.tobytes())
        yield Value(tensor=tensor)


def _replace_slices(value: Value, firsts: dict[int, int]) -> None:
    """Replace the slices of stacks in a value, and in its items, by references."""
    kind = value.WhichOneof("kind")
    if kind in ("list", "tuple"):
        items = getattr(value, kind).items
        if any(item.WhichOneof("kind") == "stacked" for item in items):
            kept = [one for item in items for one in _references(item, firsts)]
            del items[:]
            items.extend(kept)
    elif kind == "stacked":
        [one] = _references(value, firsts)
        value.CopyFrom(one)


def _references(value: Value, firsts: dict[int, int]) -> list[Value]:
    if value.WhichOneof("kind") != "stacked":
        copy = Value()
        copy.CopyFrom(value)
        return [copy]
    first = firsts[value.stacked.stack] + value.stacked.first
    return [Value(ref=first + i) for i in range(value.stacked.count)]
