"""The functions that a plan's code may use: torch's on tensors, and arithmetic on numbers."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import get_overridable_functions

_MODULES = (
    torch,
    torch.nn,
    torch.nn.functional,
    torch.linalg,
    torch.special,
    torch.fft,
    math,
    operator,
)
_ANY = (math, operator)  # all that they have works on values alone
# What makes tensors of numbers; where memory is not written or numbers are drawn, the trace says so with its own words.
_MADE = (
    *(
        "zeros",
        "ones",
        "full",
        "arange",
        "eye",
        "tensor",
        "linspace",
        "logspace",
        "scalar_tensor",
        "as_tensor",
        "no_grad",
    ),
    *("empty", "rand", "randn", "randint", "randperm", "normal"),
)
_OF_VALUES = (
    functools.reduce,
    functools.partial,
    itertools.chain,
    itertools.product,
    itertools.islice,
    itertools.repeat,
)
_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, int, float, bool, str)
_SETTERS = frozenset({"setitem", "delitem", "iadd", "iconcat", "attrgetter", "methodcaller"})


@functools.cache
def _of_torch() -> frozenset[int]:
    """Return the ids of torch's functions that work on tensors or make tensors."""
    functions = {id(one) for many in get_overridable_functions().values() for one in many}
    return frozenset(functions | {id(getattr(torch, name)) for name in _MADE})


def is_module(value: object) -> bool:
    """Return whether a value is a module whose functions a plan may use."""
    return any(value is one for one in _MODULES)


def is_function(value: Any) -> bool:
    """Return whether a value is a function of a library that a plan may use."""
    if id(value) in _of_torch() or any(value is one for one in _OF_VALUES):
        return True
    if isinstance(value, BuiltinFunctionType | FunctionType | type):
        name = getattr(value, "__name__", "")
        return any(name not in _SETTERS and getattr(module, name, None) is value for module in _ANY)
    return False


def why_not(module: ModuleType, names: tuple[str, ...]) -> str:
    """Return why a plan cannot use a dotted name of a module; "" if it can.

    Args:
        module: where the name begins.
        names: the attributes that follow it.
    """
    value: Any = module
    for count, name in enumerate(names, 1):
        if not isinstance(value, ModuleType):
            return ""  # an attribute of a constant
        if not is_module(value):
            break
        if not hasattr(value, name):
            return f"{value.__name__} has no {name}"
        value = getattr(value, name)
        if isinstance(value, ModuleType):
            continue
        if isinstance(value, _CONSTANTS) or is_function(value) or isinstance(value, frozenset):
            return ""
        return f"{'.'.join((module.__name__, *names[:count]))} is no function on tensors alone"
    if isinstance(value, ModuleType) and is_module(value):
        return f"the module {value.__name__} is used as a value"
    return f"the module {getattr(value, '__name__', '')} runs Python that a plan cannot repeat (time, chance, files or state)"
