"""Makes Python objects of typed wire values; a table's entry always gives the same object.

What only the receiver can rebuild (modules of the served model, the tracer, functions) is asked of a `Resolver`. Anything
malformed is a `WireError`, never a crash.

Size: a method for each kind of value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from interpose.contract.cache import Cache, Visit
from interpose.contract.result import Logprob, Result
from interpose.v1 import value_pb2
from interpose.v1.value_pb2 import Value
from interpose.wire import arrays, stacks
from interpose.wire import stdlib as calls
from interpose.wire.arrays import ArrayError
from interpose.wire.encoder import MAX_DEPTH, WireError
from interpose.wire.instances import hashes_by_own_code
from interpose.wire.resolver import Decode, Resolver

_RECORDS: dict[str, Any] = {"result": Result, "logprob": Logprob, "cache": Cache, "visit": Visit}
_CONTAINERS: dict[str, type] = {"list": list, "dict": dict, "set": set}
# What a resolver may announce before it is complete.
_RESOLVED = frozenset({"function", "class_source", "instance", "namespace"})
_DECIMAL = re.compile(r"-?[0-9]{1,4300}", re.ASCII)
_MAX_HASHED = 20_000_000  # parts of keys and elements; a tuple that holds one twice hashes it twice
_MAX_SLICED = 20_000_000  # items that slices of stacks give; a slice may occur twice


def _closed(blob: value_pb2.Blob) -> Any:
    raise WireError(f"the blob {blob.id} is asked for after the end")


class Decoder:
    """Rebuilds objects from values and the table that the values refer to.

    An index of the table always gives the same object.

    Args:
        objects: the table.
        get_blob: returns the bytes of a blob; a writable buffer is taken over, a read-only one is copied.
        resolver: rebuilds what only the receiver knows.
        library: "auto" gives torch tensors where they were torch tensors and torch is installed; "numpy" never does.
    """

    def __init__(
        self,
        objects: value_pb2.Objects,
        *,
        get_blob: Callable[[value_pb2.Blob], Any],
        resolver: Resolver | None = None,
        library: str = "auto",
    ) -> None:
        self._values = objects.values
        self._get_blob = get_blob
        self._resolver = resolver or Resolver()
        self._torch = library != "numpy"
        self._made: dict[int, Any] = {}
        self._waiting: dict[int, list[Callable[[Any], None]]] = {}  # by index: what to do when its object is made
        self._classes: list[type] = []  # made from the sender's source
        self._entry: int | None = None  # the table's index of the value that is decoded next, if it is an entry
        self._making: list[int | None] = []  # of the functions, classes and objects being made, outermost first
        self._hashed = 0  # parts of what has been hashed
        self._stacks: dict[int, list[Any]] = {}  # the arrays of the stacks that have been rebuilt, by index
        self._sliced = 0  # items that slices of stacks have given
        self._depth = 0

    def decode(self, value: Value) -> Any:
        """Return the object of a value; WireError if the value is malformed or refused."""
        if self._depth >= MAX_DEPTH:
            raise WireError(f"values nested deeper than {MAX_DEPTH}")
        self._depth += 1
        try:
            return self._object(value.ref) if value.WhichOneof("kind") == "ref" else self._plain(value)
        except (ArrayError, UnicodeError) as error:
            raise WireError(str(error)) from error
        except RecursionError:
            raise WireError("values nested too deeply") from None
        finally:
            self._depth -= 1

    __call__ = decode

    def adopt(self, targets: Mapping[int, Any]) -> None:
        """Fill lists, dicts and sets that exist already with the contents of the table's entries.

        They are the objects of these entries from then on.
        """
        for index, target in targets.items():
            kind = self._values[index].WhichOneof("kind") if index < len(self._values) else None
            if not isinstance(target, _CONTAINERS.get(kind or "", ())) or index in self._made:
                raise WireError(f"a {type(target).__name__} cannot take the place of entry {index} of the table")
            self._made[index] = target
        for index, target in targets.items():
            target.clear()
            self._fill(target, self._values[index])

    def array(self, tensor: value_pb2.Tensor) -> Any:
        """Return the array of a tensor message, with the message's shape [...] and dtype."""
        try:
            return self._tensor(tensor)
        except ArrayError as error:
            raise WireError(str(error)) from error

    def object(self, index: int) -> Any:
        """Return the object of the table's entry `index`."""
        return self.decode(Value(ref=index))

    def complete(self, index: int) -> None:
        """Make the object, or the arrays of the stack, of the table's entry `index`."""
        if self._values[index].WhichOneof("kind") == "stack":
            self.stack(index)
        else:
            self.object(index)

    def stack(self, index: int) -> list[Any]:
        """Return the arrays of the stack at entry `index` of the table."""
        if index not in self._stacks:
            if index >= len(self._values) or self._values[index].WhichOneof("kind") != "stack":
                raise WireError(f"entry {index} of a table of {len(self._values)} is no stack")
            try:
                made = self._apart(self._values[index].stack)
            except ArrayError as error:
                raise WireError(str(error)) from error
            self._stacks[index] = [self._placed(array) for array in made]
        return self._stacks[index]

    def items(self, values: Iterable[Value]) -> list[Any]:
        """Return the items of a list or tuple."""
        items: list[Any] = []
        for value in values:
            if value.WhichOneof("kind") == "stacked":
                items.extend(self._slice(value.stacked))
            else:
                items.append(self.decode(value))
        return items

    def close(self) -> None:
        """Drop what was made, and what the receiver gave; nothing more is decoded."""
        self._made.clear()
        self._stacks.clear()
        self._waiting.clear()
        self._classes.clear()
        self._resolver, self._get_blob = Resolver(), _closed

    def made(self) -> dict[int, Any]:
        """Return the objects of the table that have been rebuilt so far, by index."""
        return dict(self._made)

    def into(self, namespace: MutableMapping[str, Any], bindings: Iterable[value_pb2.Binding]) -> None:
        """Bind names in a namespace.

        The name of a function that is still being made is bound when the function is complete.
        """
        for binding in bindings:
            self._assign(binding.value, lambda obj, name=binding.name: namespace.__setitem__(name, obj))  # type: ignore[misc]

    def announce(self, obj: Any) -> None:
        """Announce a function, class or object that is being made.

        Values that lead back to it find it, although it is not complete yet.
        """
        index = self._making[-1] if self._making else None
        if isinstance(obj, type):
            self._classes.append(obj)
        if index is not None and index not in self._made:
            self._made[index] = obj
            for assign in self._waiting.pop(index, ()):
                assign(obj)

    def _resolved(self, value: Value, resolve: Callable[[Any, Decode], Any]) -> Any:
        self._making.append(self._entry)
        self._entry = None
        try:
            kind = value.WhichOneof("kind") or ""
            return resolve(getattr(value, kind), self)
        finally:
            self._making.pop()

    def _object(self, index: int) -> Any:
        if index in self._made:
            return self._made[index]
        if index >= len(self._values):
            raise WireError(f"reference {index} into a table of {len(self._values)}")
        if index in self._waiting:
            raise WireError(f"entry {index} of the table holds itself in a way that cannot be rebuilt")
        value = self._values[index]
        kind = value.WhichOneof("kind")
        if kind == "ref":
            raise WireError(f"entry {index} of the table is a reference")
        if kind in ("list", "dict", "set"):
            made: Any = _CONTAINERS[kind]()
            self._made[index] = made
            self._fill(made, value)
            return made
        self._waiting[index] = []
        self._entry = index if kind in _RESOLVED else None
        try:
            made = self._tensor(value.tensor) if kind == "tensor" else self._plain(value)
        except BaseException:
            self._waiting.pop(index, None)
            self._made.pop(index, None)  # announced, but not completed
            raise
        self._made[index] = made
        for assign in self._waiting.pop(index, ()):
            assign(made)
        return made

    def _assign(self, value: Value, assign: Callable[[Any], None]) -> None:
        """Decode and assign, now or when the entry that is still being made is done."""
        if value.WhichOneof("kind") == "ref" and value.ref in self._waiting:
            self._waiting[value.ref].append(assign)
        else:
            assign(self.decode(value))

    def _fill(self, made: Any, value: Value) -> None:
        if isinstance(made, list):
            for item in value.list.items:
                if item.WhichOneof("kind") == "stacked":
                    made.extend(self._slice(item.stacked))
                    continue
                index = len(made)
                made.append(None)
                self._assign(item, lambda obj, i=index: made.__setitem__(i, obj))  # type: ignore[misc]
        elif isinstance(made, dict):
            if len(value.dict.keys) != len(value.dict.values):
                raise WireError("a mapping with keys and values of different number")
            for key, item in zip(value.dict.keys, value.dict.values, strict=True):
                name = self.decode(key)
                self._hash(name, lambda name=name: made.__setitem__(name, None))  # type: ignore[misc]
                # The order is kept when the item comes later.
                self._assign(
                    item,
                    lambda obj, name=name: self._hash(name, lambda: made.__setitem__(name, obj)),  # type: ignore[misc]
                )
        else:
            for item in value.set.items:
                element = self.decode(item)
                self._hash(element, lambda element=element: made.add(element))  # type: ignore[misc]

    def _frozen_set(self, value: Value) -> frozenset:
        items = self._tuple(value.frozen_set)
        found: list[frozenset] = []
        self._hash(items, lambda: found.append(frozenset(items)))
        return found[0]

    def _hash(self, obj: Any, do: Callable[[], Any]) -> None:
        """Do what hashes an object, or the items of a tuple."""
        self._hashed += _parts(obj)
        if self._hashed > _MAX_HASHED:
            raise WireError(f"keys of dicts and elements of sets with more than {_MAX_HASHED} parts together")
        try:
            if self._classes and hashes_by_own_code(obj, self._classes):
                self._resolver.run_own(do)
            else:
                do()
        except TypeError as error:
            raise WireError(f"a key or an element of a set that cannot be hashed: {error}") from error

    def _plain(self, value: Value) -> Any:
        kind = value.WhichOneof("kind")
        if kind in ("boolean", "integer", "real", "text", "data"):
            return getattr(value, kind)
        if kind in ("list", "dict", "set"):
            made: Any = _CONTAINERS[kind]()
            self._fill(made, value)
            return made
        make = _MAKERS.get(kind or "")
        if make is None:
            raise WireError(f"a value of unknown kind {kind}")
        return make(self, value)

    def _tensor(self, tensor: value_pb2.Tensor) -> Any:  # [...], the shape of the message
        payload = tensor.WhichOneof("payload")
        if tensor.shape_only:
            wanted = self._torch and tensor.library != value_pb2.ARRAY_LIBRARY_NUMPY
            return arrays.without_elements(tensor.dtype, tensor.shape, torch_wanted=wanted)
        if payload == "blob":
            arrays.check_layout(tensor.dtype, tensor.shape, tensor.blob.size)  # before anything is fetched
        wanted = self._torch and tensor.library != value_pb2.ARRAY_LIBRARY_NUMPY

        def make() -> Any:  # [...], the shape of the message
            data = self._get_blob(tensor.blob) if payload == "blob" else tensor.data
            return self._placed(arrays.from_bytes(tensor.dtype, tensor.shape, data, torch_wanted=wanted))

        made = self._resolver.uploaded(tensor, make) if payload == "blob" and wanted else make()
        return arrays.with_gradients(made, tensor.parameter, tensor.requires_grad)

    def _apart(self, stack: value_pb2.Stack) -> list[Any]:
        if stack.WhichOneof("payload") != "blob":
            return stacks.apart(stack, stack.data, torch_wanted=self._torch)
        stacks.check(stack, stack.blob.size)  # before anything is fetched
        return stacks.apart(stack, self._get_blob(stack.blob), torch_wanted=self._torch)

    def _slice(self, slice_: value_pb2.StackSlice) -> list[Any]:
        members = self.stack(slice_.stack)
        after = slice_.first + slice_.count
        if not slice_.count or after > len(members):
            raise WireError(f"arrays {slice_.first} to {after} of a stack of {len(members)}")
        self._sliced += slice_.count
        if self._sliced > _MAX_SLICED:
            raise WireError(f"slices of stacks with more than {_MAX_SLICED} arrays together")
        return members[slice_.first : after]

    def _single(self, value: Value) -> Any:
        if value.stacked.count != 1:
            raise WireError(f"{value.stacked.count} arrays of a stack where one is meant")
        return self._slice(value.stacked)[0]

    def _inline_tensor(self, value: Value) -> Any:
        """Return an array that is no entry of the table.

        numpy's scalars travel as such arrays, with no dimensions.
        """
        array = self._tensor(value.tensor)
        tensor = value.tensor
        scalar = tensor.library == value_pb2.ARRAY_LIBRARY_NUMPY and not tensor.shape and not tensor.shape_only
        return array[()] if scalar else array

    def _placed(self, made: Any) -> Any:
        return self._resolver.placed(made) if arrays.is_tensor(made) else made

    def _tuple(self, items: value_pb2.Items) -> tuple:
        return tuple(self.items(items.items))

    def _big_integer(self, value: Value) -> int:
        if not _DECIMAL.fullmatch(value.big_integer):
            raise WireError("an integer that is not decimal digits")
        return int(value.big_integer)

    def _range(self, value: Value) -> range:
        if not value.range.step:
            raise WireError("a range with step 0")
        return range(value.range.start, value.range.stop, value.range.step)

    def _size(self, value: Value) -> Any:
        lengths = self._tuple(value.size)
        if not all(type(length) is int for length in lengths):
            raise WireError("a size that is not integers")
        torch = arrays.installed_torch() if self._torch else None
        return lengths if torch is None else torch.Size(lengths)

    def _record(self, value: Value) -> Any:
        fields = value.record.fields
        names = [key.text for key in fields.keys]
        kind = _RECORDS.get(value.record.type)
        if kind is None or not set(names) <= set(kind.__dataclass_fields__):
            raise WireError(f"a record of unknown type {value.record.type!r} or with unknown fields: {names}")
        if len(names) != len(fields.values):
            raise WireError(f"a {value.record.type} with {len(names)} names for {len(fields.values)} values")
        given = {name: self.decode(item) for name, item in zip(names, fields.values, strict=True)}
        try:
            return kind(**given)
        except TypeError as error:
            raise WireError(f"a {value.record.type} that lacks something: {error}") from None

    def _call(self, value: Value) -> Any:
        call = value.call
        args = tuple([self.decode(item) for item in call.args])
        keywords = {binding.name: self.decode(binding.value) for binding in call.keywords}
        made: list[object] = []

        def make() -> None:
            try:
                made.append(calls.make(call.function.module, call.function.name, args, keywords))
            except ValueError as error:
                raise WireError(str(error)) from None

        self._resolver.run_own(make)
        return made[0]

    def _dtype(self, value: Value) -> Any:
        kind = arrays.torch_dtype(value.dtype) if self._torch else None
        return arrays.numpy_dtype(value.dtype) if kind is None else kind

    def _device(self, value: Value) -> Any:
        torch = arrays.installed_torch() if self._torch else None
        try:
            return value.device if torch is None else torch.device(value.device)
        except RuntimeError as error:
            raise WireError(f"no such device: {value.device!r}") from error


def _parts(obj: object, known: dict[int, int] | None = None) -> int:
    """Return how many objects hashing a tuple looks at, itself included."""
    base: Any = next((base for base in (tuple, frozenset) if isinstance(obj, base)), None)
    if base is None:
        return 1
    known = {} if known is None else known
    if id(obj) not in known:
        known[id(obj)] = 1 + sum(_parts(part, known) for part in base.__iter__(obj))
    return known[id(obj)]


_MAKERS: dict[str, Callable[[Decoder, Value], Any]] = {
    "none": lambda d, v: None,
    "big_integer": Decoder._big_integer,
    "complex_number": lambda d, v: complex(v.complex_number.real, v.complex_number.imaginary),
    "tensor": Decoder._inline_tensor,
    "stacked": Decoder._single,
    "tuple": lambda d, v: d._tuple(v.tuple),
    "frozen_set": Decoder._frozen_set,
    "slice": lambda d, v: slice(d.decode(v.slice.start), d.decode(v.slice.stop), d.decode(v.slice.step)),
    "ellipsis": lambda d, v: Ellipsis,
    "not_implemented": lambda d, v: NotImplemented,
    "range": Decoder._range,
    "size": Decoder._size,
    "record": Decoder._record,
    "dtype": Decoder._dtype,
    "device": Decoder._device,
    "module": lambda d, v: d._resolver.module(v.module),
    "tracer": lambda d, v: d._resolver.tracer(),
    "barrier": lambda d, v: d._resolver.barrier(v.barrier),
    "python_module": lambda d, v: d._resolver.python_module(v.python_module),
    "symbol": lambda d, v: d._resolver.symbol(v.symbol.module, v.symbol.name),
    "function": lambda d, v: d._resolved(v, d._resolver.function),
    "class_source": lambda d, v: d._resolved(v, d._resolver.class_source),
    "instance": lambda d, v: d._resolved(v, d._resolver.instance),
    "namespace": lambda d, v: d._resolved(v, d._resolver.namespace),
    "attribute": lambda d, v: d._resolver.attribute(d.decode(v.attribute.object), v.attribute.name),
    "call": Decoder._call,
    "captured": lambda d, v: d._resolver.captured(v.captured),
    "remote": lambda d, v: d._resolver.remote(v.remote),
    "pickled": lambda d, v: d._resolver.pickled(v.pickled),
}
