"""Takes objects of classes apart into their contents, and rebuilds them.

Neither their class is called nor pickle used.

An object is its attributes (those in its dict and in its slots) and, where its class extends a built-in type, what it
holds as one of those. Nothing of the class's own runs on either side: no `__init__`, `__reduce__` or `__setstate__`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# What a class may extend, most special first. The immutable ones are made with their contents, the others filled.
_IMMUTABLE: tuple[type, ...] = (int, float, complex, str, bytes, tuple, frozenset)
_FILLED: tuple[type, ...] = (list, dict, set)
# Of a torch module: the rest of what the base class keeps are hooks and caches, which are made anew.
_MODULE_STATE = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by C code that wants to look so
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


class NotTaken(ValueError):
    """An object has more than attributes, or its attributes cannot be set."""


def contents_of(obj: Any) -> object:
    """Return the list, dict, str … that an object is, as a plain object of that type.

    It is None if the object's class extends none of these types.
    """
    base: Any
    for base in (*_IMMUTABLE, *_FILLED):
        if isinstance(obj, base):
            if base is dict:
                return dict(dict.items(obj))
            if base in (list, tuple, set, frozenset):
                return base(base.__iter__(obj))
            return base.__new__(base, obj)
    return None


def attributes_of(obj: Any) -> dict[str, object]:
    """Return an object's own attributes.

    Raises:
        NotTaken: it has more than that: something that only its own class's code knows, or hooks on a torch module.
    """
    cls = type(obj)
    _check_plain(cls)
    found: dict[str, object] = dict(object.__getattribute__(obj, "__dict__")) if hasattr(obj, "__dict__") else {}
    for name, slot in _slots(cls).items():
        try:
            found[name] = slot.__get__(obj, cls)
        except AttributeError:  # not assigned
            continue
    base = torch_module()
    return _module_attributes(found, base) if base is not None and isinstance(obj, base) else found


def is_made_with_contents(cls: object) -> bool:
    """Whether objects of a class get their contents when they are made, and never after."""
    return isinstance(cls, type) and issubclass(cls, _IMMUTABLE)


def allocate(cls: Any, contents: object) -> Any:
    """Make an object of a class, without attributes and, but for immutable contents, empty.

    Raises:
        NotTaken: objects of the class cannot be made that way.
    """
    if not isinstance(cls, type):
        raise NotTaken("an object of something that is no class")
    base: Any = next((base for base in (*_IMMUTABLE, *_FILLED) if issubclass(cls, base)), object)
    if base in _IMMUTABLE and type(contents) is not base:  # a tuple of an endless range, say
        raise NotTaken(f"a {cls.__qualname__} is made from a {base.__name__}, not from a {type(contents).__name__}")
    try:
        made: Any = base.__new__(cls, contents) if base in _IMMUTABLE else base.__new__(cls)
    except TypeError as error:
        raise NotTaken(f"no {cls.__qualname__} can be made from its parts: {error}") from None
    base = torch_module()
    if base is not None and isinstance(made, base):
        base.__init__(made)
    return made


def restore(obj: Any, contents: object, attributes: Mapping[str, object]) -> None:
    """Give an allocated object its contents and attributes.

    Raises:
        NotTaken: they do not fit it.
    """
    if isinstance(obj, list) and isinstance(contents, list):
        list.extend(obj, contents)
    elif isinstance(obj, dict) and isinstance(contents, dict):
        dict.update(obj, contents)
    elif isinstance(obj, set) and isinstance(contents, set):
        set.update(obj, contents)
    slots = _slots(type(obj))
    own = object.__getattribute__(obj, "__dict__") if hasattr(obj, "__dict__") else None
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(obj, value)
        elif isinstance(own, dict):
            own[name] = value
        else:
            raise NotTaken(f"a {type(obj).__qualname__} has no attribute {name!r}")


def hashes_by_own_code(obj: object, classes: Sequence[type]) -> bool:
    """Whether hashing or comparing an object runs code of one of `classes`."""
    todo = [obj]
    while classes and todo:
        found = todo.pop()
        for method in ("__hash__", "__eq__"):
            if next((base for base in type(found).__mro__ if method in vars(base)), object) in classes:
                return True
        if isinstance(found, tuple):
            todo.extend(tuple.__iter__(found))
        elif isinstance(found, frozenset):
            todo.extend(frozenset.__iter__(found))
    return False


def torch_module() -> Any:
    """Return `torch.nn.Module` where torch is loaded, else None."""
    torch = sys.modules.get("torch")
    return getattr(getattr(torch, "nn", None), "Module", None)


def _check_plain(cls: type) -> None:
    """Refuse a class whose objects hold what is not among their attributes."""
    allowed = {base.__new__ for base in (object, *_IMMUTABLE, *_FILLED)}
    for base in cls.__mro__:
        maker = vars(base).get("__new__")
        if isinstance(maker, types.BuiltinFunctionType) and maker not in allowed:
            raise NotTaken(f"an object of type {cls.__qualname__}, whose state only {base.__module__} knows")


def is_made_of_attributes(cls: type) -> bool:
    """Whether objects of a class are nothing but their attributes.

    That holds if the class leaves pickling to Python.
    """
    plain = (object, *_IMMUTABLE, *_FILLED)
    own = [base for base in cls.__mro__ if base not in plain]
    heap = all(base.__flags__ & _HEAP_TYPE for base in own)
    return bool(own) and heap and not any(name in vars(base) for base in own for name in _PICKLING)


def has_its_attributes_as_state(obj: object) -> bool:
    """Whether the code for pickling that an object's class has gives the attributes as they are."""
    cls = type(obj)
    own = [base for base in cls.__mro__ if base is not object]
    written = {name for base in own for name in _PICKLING if name in vars(base)}
    attributes = getattr(obj, "__dict__", None)
    if not all(base.__flags__ & _HEAP_TYPE for base in own) or _slots(cls) or not isinstance(attributes, dict):
        return False
    found = next((base for base in own if "__getstate__" in vars(base)), None)
    if found is None or written - {"__getstate__", "__setstate__"}:
        return False
    try:
        state: Any = vars(found)["__getstate__"](obj)
    except Exception:  # code of others
        return False
    if not isinstance(state, dict) or state.keys() != attributes.keys():
        return False
    return all(state[name] is value for name, value in attributes.items())


def is_tensor_class(cls: type) -> bool:
    """Whether objects of a class are arrays, which have a wire type of their own."""
    torch = sys.modules.get("torch")
    return issubclass(cls, (np.ndarray, np.generic)) or (torch is not None and issubclass(cls, torch.Tensor))


def _slots(cls: type) -> dict[str, Any]:
    """The slots of a class and its bases, by attribute."""
    return {
        name: value
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }


def _module_attributes(found: dict[str, object], base: Any) -> dict[str, object]:
    """Of a torch module's attributes those that are its own; its hooks cannot come along."""
    internal = vars(base())
    for name, value in found.items():
        if name in internal and name not in _MODULE_STATE and isinstance(value, dict) and value:
            raise NotTaken(f"a torch module with hooks ({name.strip('_')}); remove them first: handle.remove()")
    return {name: value for name, value in found.items() if name not in internal or name in _MODULE_STATE}
