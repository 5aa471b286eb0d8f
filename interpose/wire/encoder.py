"""Python objects become typed wire values, without pickle.

Containers and tensors get an entry in one table (`Objects`), so that an object reached twice stays one object and cycles
work.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from interpose.contract.cache import Cache, Visit
from interpose.contract.result import Logprob, Result
from interpose.v1 import value_pb2
from interpose.v1.value_pb2 import Blob, Stack, StackSlice, Value
from interpose.wire import arrays
from interpose.wire import stdlib as calls
from interpose.wire.arrays import ArrayError
from interpose.wire.stacked import StackedArrays

MAX_DEPTH = 100
_RECORDS = (Result, Logprob, Cache, Visit)
_INT64 = 1 << 63


class WireError(ValueError):
    """An object that cannot travel, or a malformed value.

    Attributes:
        where: the way from the encoded object to the one that cannot travel, e.g. `['hooks'][0]`; "" is the object.
        subject: the object that cannot travel, when encoding.
    """

    def __init__(self, message: str, subject: object = None) -> None:
        super().__init__(message)
        self.where = ""
        self.subject = subject


def _nothing_special(obj: object) -> Value | None:
    return None


def _themselves(objects: Sequence[Any]) -> Sequence[Any]:
    return objects


class Encoder:
    """Encodes objects into one shared table.

    Args:
        inline_bytes: arrays up to this size travel inside the message, larger ones as blobs.
        put_blob: gets the contiguous little-endian bytes of one array and returns the blob's id.
        special: is asked first for the value of every object; None means that it has nothing to say.
        sent: returns the objects that are encoded in the place of the items of a list or tuple: by default the items.
        fallback: is asked last, for an object that is none of the known types.
        gradients: whether torch tensors keep that they are parameters, and that gradients are computed for them.
        objects: the table, empty; None makes one.
    """

    def __init__(
        self,
        *,
        inline_bytes: int,
        put_blob: Callable[[memoryview], str],
        special: Callable[[object], Value | None] = _nothing_special,
        sent: Callable[[Sequence[Any]], Sequence[Any]] = _themselves,
        fallback: Callable[[object], Value] | None = None,
        gradients: bool = False,
        objects: value_pb2.Objects | None = None,
    ) -> None:
        self.objects = value_pb2.Objects() if objects is None else objects
        self._inline_bytes = inline_bytes
        self._put_blob = put_blob
        self._special = special
        self._sent = sent
        self._fallback = fallback
        self._gradients = gradients
        # Objects by identity; the reference kept beside each index makes sure that no id is used twice.
        self._entries: dict[int, tuple[int, object]] = {}
        self._stacked = StackedArrays()
        self._depth = 0

    def encode(self, obj: object) -> Value:
        """Return the value of obj, adding to the table what it needs; WireError if it cannot travel."""
        entry = self._entries.get(id(obj))
        if entry is not None:
            return Value(ref=entry[0])
        stacked = self._stacked.find(obj)
        if stacked is not None:
            return Value(stacked=StackSlice(stack=stacked[0], first=stacked[1], count=1))
        if self._depth >= MAX_DEPTH:
            raise WireError(f"values nested deeper than {MAX_DEPTH} cannot travel", obj)
        self._depth += 1
        try:
            special = self._special(obj)
            return special if special is not None else self._plain(obj)
        except ArrayError as error:
            raise WireError(str(error), obj) from error
        except RecursionError:
            raise WireError("values nested too deeply cannot travel", obj) from None
        finally:
            self._depth -= 1

    def close(self) -> None:
        """Drop the objects that were encoded, and the sender's functions; nothing more is encoded."""
        self._entries.clear()
        self._stacked = StackedArrays()
        self._special, self._sent, self._fallback = _nothing_special, _themselves, None

    def index_of(self, obj: object) -> int | None:
        """Return the index of obj in the table, by identity; None if it has no entry."""
        entry = self._entries.get(id(obj))
        return None if entry is None else entry[0]

    def entries(self) -> dict[int, object]:
        """Return the objects that have an entry in the table, by index."""
        return dict(self._entries.values())

    def entries_from(self, first: int) -> list[tuple[int, object]]:
        """Return the objects of the table's entries from index `first` on, in order."""
        added = itertools.takewhile(lambda entry: entry[0] >= first, reversed(self._entries.values()))
        return list(added)[::-1]

    def knows(self, obj: object) -> bool:
        """Return whether obj has an entry in the table, or a place in a stack."""
        return id(obj) in self._entries or self._stacked.find(obj) is not None

    def stack(self, members: Sequence[Any], layout: Stack, payload: bytes | Blob) -> int:
        """Put arrays into the table as one stack; return its index.

        Args:
            members: the arrays, which `knows` does not know yet.
            layout: the stack's message without its bytes.
            payload: the bytes of the arrays, or the blob that holds them.
        """
        index = self._add_stack(layout, payload)
        self._stacked.note(index, members)
        return index

    def stack_runs(self, runs: Sequence[Sequence[Any]], layout: Stack, payload: bytes | Blob) -> None:
        """Put the arrays of some runs into the table as one stack, as `stack` does.

        Each run is part of a list.
        """
        self._stacked.note_runs(self._add_stack(layout, payload), runs)

    def _add_stack(self, layout: Stack, payload: bytes | Blob) -> int:
        index = len(self.objects.values)
        added = self.objects.values.add(stack=layout).stack
        if isinstance(payload, Blob):
            added.blob.CopyFrom(payload)
        else:
            added.data = payload
        return index

    def items(self, items: Iterable[object]) -> list[Value]:
        """Return the values of the items of a list or tuple.

        Arrays that follow each other in a stack are one value.

        Raises:
            WireError: an item cannot travel.
        """
        items = list(items)
        if not self._stacked:
            return [self._item(i, item) for i, item in enumerate(items)]
        return self._stacked.values(items, self._sent(items), self._item)

    def refer(self, obj: object, build: Callable[[], Value]) -> Value:
        """Give an object an entry in the table and fill it with `build()`; return the reference.

        `build()` may reach the object again.

        An object that has an entry keeps it.
        """
        entry = self._entries.get(id(obj))
        if entry is not None:
            return Value(ref=entry[0])
        index = len(self.objects.values)
        self.objects.values.add(none=True)
        self._entries[id(obj)] = (index, obj)
        try:
            self.objects.values[index].CopyFrom(build())
        except BaseException:
            del self._entries[id(obj)]
            raise
        return Value(ref=index)

    def reserve(self, obj: object) -> int:
        """Give obj an entry in the table that holds nothing yet, if it has none; return its index."""
        return self.refer(obj, lambda: Value(none=True)).ref

    def fill(self, obj: Any) -> None:
        """Put a list, dict, set, tensor or array into the entry that it has."""
        build = self._contents_of(obj)
        assert build is not None
        self.objects.values[self._entries[id(obj)][0]].CopyFrom(build())

    def array(self, obj: Any) -> Value:
        """Return a tensor's or an array's elements now, without an entry in the table."""
        if arrays.is_tensor(obj):
            return self._array(obj, arrays.tensor_bytes(obj), value_pb2.ARRAY_LIBRARY_TORCH)
        return self._array(obj, arrays.ndarray_bytes(obj), value_pb2.ARRAY_LIBRARY_NUMPY)

    def _plain(self, obj: Any) -> Value:
        scalar = _scalar(obj)
        if scalar is not None:
            return scalar
        kind = type(obj)
        build = self._contents_of(obj)
        if build is not None:
            return self.refer(obj, build)
        if kind is tuple:
            return self._frozen(obj, Value(tuple=value_pb2.Items(items=self.items(obj))), obj)
        if kind is frozenset:
            return self._frozen(obj, Value(frozen_set=self._items(obj)), obj)
        if kind is slice:
            parts = (obj.start, obj.stop, obj.step)
            start, stop, step = self._items(parts).items
            return self._frozen(obj, Value(slice=value_pb2.SliceValue(start=start, stop=stop, step=step)), parts)
        if isinstance(obj, np.generic):
            scalar_array = np.asarray(obj)
            return self._array(scalar_array, arrays.ndarray_bytes(scalar_array), value_pb2.ARRAY_LIBRARY_NUMPY)
        if kind in _RECORDS:
            name = kind.__name__.lower()
            return self.refer(obj, lambda: Value(record=value_pb2.Record(type=name, fields=self._mapping(vars(obj)))))
        made = calls.parts_of(obj)
        if made is not None:
            return self.refer(obj, lambda: Value(call=self._call(*made)))
        return self._torch_constant(obj)

    def _contents_of(self, obj: Any) -> Callable[[], Value] | None:
        """Return the function that encodes an object's contents.

        It is None for an object that has no entry in the table.
        """
        kind = type(obj)
        if kind is list:
            return lambda: Value(list=value_pb2.Items(items=self.items(obj)))
        if kind is dict or kind is OrderedDict:
            return lambda: Value(dict=self._mapping(obj))
        if kind is set:
            return lambda: Value(set=self._items(obj))
        if kind is np.ndarray or kind is np.memmap or arrays.is_tensor(obj):
            return lambda: self.array(obj)
        return None

    def _torch_constant(self, obj: Any) -> Value:
        torch = arrays.loaded_torch()
        if torch is not None:
            if isinstance(obj, torch.dtype):
                return Value(dtype=arrays.dtype_of(obj))  # type: ignore[arg-type]
            if isinstance(obj, torch.device):
                return Value(device=str(obj))
            if isinstance(obj, torch.Size):
                return Value(size=self._items(obj))
        if self._fallback is not None:
            return self._fallback(obj)
        raise WireError(_refusal(obj), obj)

    def _call(self, module: str, name: str, parts: calls.Parts) -> value_pb2.Call:
        args, keywords = parts
        function = value_pb2.Symbol(module=module, name=name)
        bindings = [value_pb2.Binding(name=key, value=self.encode(item)) for key, item in keywords.items()]
        return value_pb2.Call(function=function, args=self._items(args).items, keywords=bindings)

    def _items(self, items: Iterable[object]) -> value_pb2.Items:
        return value_pb2.Items(items=[self._item(i, item) for i, item in enumerate(items)])

    def _item(self, i: int, item: object) -> Value:
        try:
            return self.encode(item)
        except WireError as error:
            error.where = f"[{i}]{error.where}"
            raise

    def _mapping(self, mapping: dict) -> value_pb2.Mapping:
        made = value_pb2.Mapping()
        add_key, add_value, find = made.keys.add, made.values.add, self._stacked.find
        for key, value in mapping.items():
            try:
                if type(key) is str and key.isascii():
                    add_key(text=key)
                else:
                    add_key().CopyFrom(self.encode(key))
                stacked = find(value) if id(value) not in self._entries else None
                if stacked is None:
                    add_value().CopyFrom(self.encode(value))
                else:
                    add_value(stacked=StackSlice(stack=stacked[0], first=stacked[1], count=1))
            except WireError as error:
                error.where = f"[{_short(key)}]{error.where}"
                raise
        return made

    def _frozen(self, obj: object, value: Value, parts: Iterable[object]) -> Value:
        """Return the value of an immutable container.

        The value is the container itself if it holds scalars only, else a reference to its entry in the table.

        Its parts are encoded before it has an entry, because a receiver makes it after them.
        """
        entry = self._entries.get(id(obj))
        if entry is not None:  # a part that can be changed holds obj itself
            return Value(ref=entry[0])
        if all(_scalar(part) is not None for part in parts):
            return value
        return self.refer(obj, lambda: value)

    def _array(self, array: Any, data: memoryview, library: Any) -> Value:
        tensor = value_pb2.Tensor(dtype=arrays.dtype_of(array.dtype), shape=array.shape, library=library)  # type: ignore[arg-type]
        if self._gradients and library == value_pb2.ARRAY_LIBRARY_TORCH:
            tensor.parameter = arrays.is_parameter(array)
            tensor.requires_grad = array.requires_grad and array.is_leaf
        if data.nbytes <= self._inline_bytes:
            tensor.data = data.tobytes()
        else:
            tensor.blob.id = self._put_blob(data)
            tensor.blob.size = data.nbytes
        return Value(tensor=tensor)


def _scalar(obj: Any) -> Value | None:
    """Return the value of an object that has no parts, or None."""
    kind = type(obj)
    if obj is None:
        return Value(none=True)
    if kind is bool:
        return Value(boolean=obj)
    if kind is int:
        return _integer(obj)
    if kind is float:
        return Value(real=obj)
    if kind is str:
        try:
            return Value(text=obj)
        except (ValueError, UnicodeError) as error:
            raise WireError(f"a string that is not valid Unicode cannot travel: {error}", obj) from error
    if kind is bytes:
        return Value(data=obj)
    if kind is complex:
        return Value(complex_number=value_pb2.ComplexNumber(real=obj.real, imaginary=obj.imag))
    if kind is range:
        if all(-_INT64 <= part < _INT64 for part in (obj.start, obj.stop, obj.step)):
            return Value(range=value_pb2.RangeValue(start=obj.start, stop=obj.stop, step=obj.step))
        raise WireError("a range with bounds outside 64 bits cannot travel", obj)
    if obj is Ellipsis:
        return Value(ellipsis=True)
    if obj is NotImplemented:
        return Value(not_implemented=True)
    return None


def _integer(number: int) -> Value:
    if -_INT64 <= number < _INT64:
        return Value(integer=number)
    if abs(number).bit_length() * math.log10(2) > 4299:
        raise WireError("an integer of more than 4299 digits cannot travel", number)
    return Value(big_integer=str(number))


def _short(obj: object) -> str:
    text = repr(obj) if isinstance(obj, str | int | float | bool | None) else f"<{type(obj).__name__}>"
    return text if len(text) <= 40 else text[:37] + "..."


def _refusal(obj: object) -> str:
    """Say that obj cannot travel and what to write instead, where there is something."""
    kind = type(obj)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    for base, hint in ((dict, "dict(x)"), (list, "list(x)"), (tuple, "tuple(x)"), (set, "set(x)"), (str, "str(x)")):
        if isinstance(obj, base):
            return f"a {name} cannot travel, a plain {base.__name__} can: write {hint}"
    if isinstance(obj, bytearray | memoryview):
        return f"a {name} cannot travel: write bytes(x)"
    if isinstance(obj, int | float):
        return f"a {name} cannot travel, a plain number can: write {'int' if isinstance(obj, int) else 'float'}(x)"
    return f"an object of type {name} cannot travel"
