"""Tuples, lists and dicts of a location's values, and what blocks may assign in them.

A tuple of the model is a real tuple in the block, and its items can be assigned. A tuple's own storage never changes and C
code reads it directly, so the storage holds cells and each cell holds the item of now. Python's protocols (indexing,
iteration, unpacking, comparison) look through the cells. torch reads the storage of a tuple of tensors; it finds the cells'
`__torch_function__` there, which calls the function again with the items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from executor.core.errors import Refusal
from interpose.v1 import trace_pb2 as pb

T = TypeVar("T")
Path = tuple[object, ...]


class Opaque:
    """Something at a location that is not the request's own and is not given to blocks.

    Using it in any way raises, so that it is never mistaken for a value.
    """

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def __repr__(self) -> str:
        return f"<not available: {object.__getattribute__(self, '_what')}>"

    def __getattr__(self, name: str) -> Any:
        raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, f"not available to a block: {self._what}")


@dataclass
class Spot:
    """A location's value while the block may assign in it.

    Attributes:
        location: its name.
        over: why an assignment would reach nothing; "" while it reaches the model.
        assigned: whether an item was assigned.
    """

    location: object
    over: str = ""
    assigned: bool = False


class Later:
    """A value that is made when a block first looks at it."""

    __slots__ = ()

    def made(self) -> Any:
        """Return the value; the same object each time."""
        raise NotImplementedError


class _Cell:
    """Holds one item of a tuple; stands in the tuple's storage."""

    __slots__ = ("held",)

    def __init__(self, item: Any) -> None:
        self.held = item

    @property
    def item(self) -> Any:
        """The item, made now if it was to be made later."""
        held = self.held
        if isinstance(held, Later):
            held = self.held = held.made()
        return held

    @item.setter
    def item(self, item: Any) -> None:
        self.held = item

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., T],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> T:
        """Call a function of torch with the items in the places of the cells."""
        named = {name: _opened(value) for name, value in (kwargs or {}).items()}
        return function(*map(_opened, args), **named)

    def __repr__(self) -> str:
        return repr(self.item)


def _opened(value: Any) -> Any:
    """Return an argument of torch's without cells."""
    if isinstance(value, _Cell):
        return value.item
    if isinstance(value, Outputs):
        return tuple(map(_opened, value))
    return [_opened(item) for item in value] if type(value) is list else value


class Outputs(tuple):
    """A tuple of the model's values whose items can be assigned: `module.output[0] = value`.

    It is saved as a plain tuple; slices of it, sums and copies are plain tuples too.
    """

    _spot: Spot
    _path: Path

    def __new__(cls, items: Iterable[Any], spot: Spot, path: Path = ()) -> Outputs:
        made = tuple.__new__(cls, map(_Cell, items))  # not of `super()`: a named tuple has one of its own
        made._spot, made._path = spot, path
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        check_item(self, key, value)
        self._spot.assigned = True
        tuple.__getitem__(self, key).item = value

    def __getitem__(self, key: Any) -> Any:
        found = tuple.__getitem__(self, key)
        return tuple(cell.item for cell in found) if isinstance(key, slice) else found.item

    def __iter__(self) -> Iterator[Any]:
        return (cell.item for cell in tuple.__iter__(self))

    def __reversed__(self) -> Iterator[Any]:
        return reversed(tuple(self))

    def __contains__(self, value: object) -> bool:
        return value in tuple(self)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == _plain(other)

    def __ne__(self, other: object) -> bool:
        return tuple(self) != _plain(other)

    def __lt__(self, other: Any) -> bool:
        return tuple(self) < _plain(other)

    def __le__(self, other: Any) -> bool:
        return tuple(self) <= _plain(other)

    def __gt__(self, other: Any) -> bool:
        return tuple(self) > _plain(other)

    def __ge__(self, other: Any) -> bool:
        return tuple(self) >= _plain(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Any) -> tuple[Any, ...]:
        return tuple(self) + _plain(other)

    def __radd__(self, other: Any) -> tuple[Any, ...]:
        return _plain(other) + tuple(self)

    def __mul__(self, count: Any) -> tuple[Any, ...]:
        return tuple(self) * count

    __rmul__ = __mul__

    def count(self, value: Any) -> int:
        return tuple(self).count(value)

    def index(self, value: Any, *bounds: Any) -> int:
        return tuple(self).index(value, *bounds)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __copy__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


_pytree.register_pytree_node(Outputs, lambda value: (list(value), None), lambda items, _: tuple(items))


class ListOutputs(list):
    """A list of the model's values; what is assigned to an item is checked."""

    def __init__(self, items: Iterable[Any], spot: Spot, path: Path = ()) -> None:
        super().__init__(items)
        self._spot, self._path = spot, path

    def __setitem__(self, key: Any, value: Any) -> None:
        check_item(self, key, value)
        self._spot.assigned = True
        super().__setitem__(key, value)


def outputs_like(original: Any, items: Iterable[Any], spot: Spot, path: Path) -> Any:
    """Return items as a block gets them where the model has a tuple, a named tuple or a list.

    Args:
        original: the model's own.
        items: what stands in the places of its items.
        spot: the location.
        path: of keys, from the location's value to this part of it.
    """
    if isinstance(original, list):
        return ListOutputs(items, spot, path)
    kind = type(original)
    return (_named(kind) if hasattr(kind, "_fields") else Outputs)(items, spot, path)


_kinds: dict[type, type[Outputs]] = {}


def _named(kind: Any) -> type[Outputs]:
    """Return the class of a named tuple whose items can be assigned.

    It is a subclass of the model's own class.
    """
    made = _kinds.get(kind)
    if made is None:

        def field(number: int) -> property:
            return property(lambda self: self[number])

        members: dict[str, Any] = {name: field(number) for number, name in enumerate(kind._fields)}
        members["_replace"] = lambda self, **changes: kind(*self)._replace(**changes)
        members["_asdict"] = lambda self: kind(*self)._asdict()
        members["__repr__"] = lambda self: repr(kind(*self))
        members["__new__"] = Outputs.__new__
        made = _kinds[kind] = type(kind.__name__, (Outputs, kind), members)
    return made


def made_here(kind: type) -> bool:
    """Return whether a class is one of a location's tuples and lists.

    Such a class is one of this module's, or the model's own class of a named tuple.
    """
    return kind is Outputs or kind is ListOutputs or kind in _kinds or kind in _kinds.values()


def as_served(old: Any, new: Any, spot: Spot) -> Any:
    """Return an assigned value in the form that a block gets.

    Its items can be assigned as those of the old value could.

    Args:
        old: the location's value so far, in the form that a block gets.
        new: what takes its place; it fits (`check`).
        spot: the location of the new value.
    """
    if not isinstance(old, Outputs | ListOutputs):
        return new
    items = [as_served(*pair, spot) for pair in zip(old, new, strict=True)]
    return type(old)(items, spot, old._path)


def kind_of(value: Any) -> type:
    """Return the model's own class of a tuple or list.

    The class is `tuple`, `list`, or the class of a named tuple.
    """
    if isinstance(value, list):
        return list
    kind = type(value)
    return next((base for base in kind.__mro__ if "_fields" in vars(base)), tuple)


def made_of(kind: Any, items: list[Any]) -> Any:
    """Return a tuple, list or named tuple of items, by its class."""
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def plainly(value: Any) -> Any:
    """Return a tuple or list of a location as one that is none of ours, as it is saved."""
    return list(value) if isinstance(value, list) else tuple(value)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Outputs) else value


def check_item(values: Outputs | ListOutputs, key: Any, value: Any) -> None:
    """Refuse to assign an item of a tuple or list of values.

    Raises:
        Refusal: the key is no number, the value does not fit, or the model would not see it.
        IndexError: there is no such item.
    """
    where = str(values._spot.location) + "".join(f"[{step!r}]" for step in values._path)
    if not isinstance(key, int):
        message = f"the values at {where} are assigned one at a time: write value[0] = …"
        raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=str(values._spot.location))
    check(values[key], value, f"{where}[{key}]")
    if values._spot.over:
        message = f"{where}[{key}] was assigned after {values._spot.over}"
        raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=str(values._spot.location))


def check(old: Any, new: Any, where: str) -> None:
    """Refuse to replace `old` by `new` if the model could not go on with it.

    Raises:
        Refusal: INVALID_ARGUMENT that names the location, both shapes, and what to write instead.
    """

    def refuse(message: str) -> Refusal:
        return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=where)

    if isinstance(old, Opaque):
        raise refuse(f"{where} cannot be assigned: {old!r}")
    if isinstance(old, torch.Tensor):
        shape = list(old.shape)
        if not isinstance(new, torch.Tensor):
            raise refuse(
                f"{where} is a tensor of shape {shape} and was assigned a {type(new).__name__}; assign a tensor of that "
                "shape, or write in place: … [:] = value"
            )
        if new.shape != old.shape:
            raise refuse(f"{where} has shape {shape} and was assigned a tensor of shape {list(new.shape)}")
        if new.is_complex() and not old.is_complex():
            raise refuse(f"{where} is {old.dtype} and was assigned {new.dtype}")
    elif isinstance(old, Outputs | ListOutputs):
        if not isinstance(new, list | tuple) or len(new) != len(old):
            got = f"{len(new)} items" if isinstance(new, list | tuple) else f"a {type(new).__name__}"
            kind = "tuple" if isinstance(old, Outputs) else "list"
            raise refuse(
                f"{where} is a {kind} of {len(old)} and was assigned {got}; assign a {kind} of {len(old)}, or one item: "
                f"{where}[0] = value"
            )
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            check(one, other, f"{where}[{i}]")
    elif isinstance(old, dict):
        if not isinstance(new, dict) or set(new) != set(old):
            raise refuse(f"{where} needs the keys {sorted(old)}")
        for name in old:
            check(old[name], new[name], f"{where}[{name!r}]")
    elif old is not new and (type(old) is not type(new) or old != new):
        raise refuse(f"{where} is {old!r}; only tensors can be assigned there")
