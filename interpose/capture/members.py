"""Tells which attributes of a class come from its text.

Python or a decorator put the others there.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Iterator

from interpose.capture.syntax import is_constant

Method = ast.FunctionDef | ast.AsyncFunctionDef
UNKNOWN = object()

_DESCRIPTORS = (
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_MAX_WRAPPERS = 20


def functions_of(cls: type, *, nested: bool = False) -> Iterator[tuple[str, types.FunctionType]]:
    """Returns the functions on a class by their attributes' names.

    Functions inside properties and decorators are among them. With `nested`, also those of the classes that stand in it.
    """
    for name, value in vars(cls).items():
        for function in unwrapped(value):
            yield name, function
        if nested and isinstance(value, type) and value.__qualname__ == f"{cls.__qualname__}.{name}":
            yield from functions_of(value, nested=True)


def unwrapped(value: object) -> Iterator[types.FunctionType]:
    """The functions that an attribute's value was made from with ``def``."""
    todo = [value]
    for _ in range(_MAX_WRAPPERS):
        if not todo:
            return
        found = todo.pop()
        if isinstance(found, property):
            todo += [found.fget, found.fset, found.fdel]
        elif isinstance(found, (functools.cached_property, functools.partialmethod)):
            todo.append(found.func)
        elif isinstance(found, (staticmethod, classmethod)):
            todo.append(found.__func__)
        elif hasattr(found, "__wrapped__") and not isinstance(found, type):
            todo.append(found.__wrapped__)
        elif isinstance(found, types.FunctionType) and not is_lambda(found):
            yield found


def is_descriptor(value: object) -> bool:
    """Whether a value means something only on a class, where its functions stand."""
    return isinstance(value, _DESCRIPTORS)


def is_generated(function: types.FunctionType) -> bool:
    """Whether a decorator made a function from a text of its own, as dataclasses do."""
    return function.__code__.co_filename.startswith(("<string>", "<attrs"))


def is_made_from_fields(cls: type) -> bool:
    """Whether a decorator or metaclass makes something else of what a class's body assigns."""
    fields = "__dataclass_fields__" in vars(cls) or "__attrs_attrs__" in vars(cls)
    return fields or issubclass(cls, enum.Enum) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def is_field(cls: type, value: ast.expr | None) -> bool:
    """Returns whether a class's assignments must be read as text.

    That is so where a decorator or metaclass makes fields of them.
    """
    return is_made_from_fields(cls) and (isinstance(value, ast.Call) or issubclass(cls, (enum.Enum, tuple)))


def is_lambda(value: object) -> bool:
    """Whether a value is a function that a lambda made."""
    return isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"


def is_automatic(cls: type, name: str, value: object) -> bool:
    """Whether Python, a metaclass or a decorator put an attribute on a class, and will again."""
    if isinstance(value, _SLOTS) or name == "_abc_impl" or name.startswith("_is_protocol"):
        return True
    if not (name.startswith("__") and name.endswith("__")):
        return dataclasses.is_dataclass(cls) and isinstance(value, dataclasses.Field)
    if not isinstance(value, types.FunctionType) or is_generated(value) or hasattr(value, "__wrapped__"):
        return True
    module = sys.modules.get(cls.__module__)
    return value.__globals__ is not vars(module) if module is not None else False


def mangled(cls: type, name: str) -> str:
    """Returns an attribute's name as the class has it.

    A private name has the class's name before it.
    """
    if not name.startswith("__") or name.endswith("__") or not cls.__name__.strip("_"):
        return name
    return f"_{cls.__name__.lstrip('_')}{name}"


def constants_of(cls: type, node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    """Returns the attributes that a class's body assigns.

    The value is the constant of ``name = constant``, else UNKNOWN.
    """
    for part in node.body:
        if isinstance(part, ast.Assign):
            targets, value = part.targets, part.value
        elif isinstance(part, ast.AnnAssign) and part.value is not None:
            targets, value = [part.target], part.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                try:
                    yield mangled(cls, target.id), ast.literal_eval(value) if is_constant(value) else UNKNOWN
                except ValueError:
                    yield mangled(cls, target.id), UNKNOWN


def same(one: object, other: object) -> bool:
    """Whether two constants are the same."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, (bool, int, float, complex, str, bytes, tuple)):
        return False
    return repr(one) == repr(other)
