"""Errors for the use of an envoy as a value, with the code to write instead.

`model.logits` is an envoy: the name of a place in the model. `model.logits.output` is the tensor there. The notebook and the
worker have envoys of different classes, which raise different errors with the same text.
"""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor")
_BINARY = (*_ARITHMETIC, "lshift", "rshift")
_UNARY = ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil")
_ORDER = ("lt", "le", "gt", "ge")
_NUMBERS = ("float", "int", "complex", "index")
# Attributes of a torch tensor that an array of numpy does not have.
_OF_TENSORS = (
    "abs add argsort backward bfloat16 bool cat chunk clone contiguous cpu cuda detach device div double eq expand flatten float "
    "gather grad half index_select int is_cuda item log log_softmax long masked_fill matmul mm mul norm numel numpy permute "
    "relu requires_grad requires_grad_ retain_grad sigmoid softmax sqrt squeeze sub tanh tolist topk type unsqueeze view where "
    "zero_"
).split()
_HAVE_NAMES_OF_MODULES = ("T", "data", "real", "imag", "base", "flags")  # may be names of modules too


def written(path: str) -> str:
    """Return the code that names a module path in a block.

    Example: "model.model.layers[2].mlp" for "model.layers.2.mlp".
    """
    parts = path.split(".") if path else []
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def of_tensors(name: str) -> bool:
    """Whether an attribute belongs to tensors, so that its use shows a name taken for a value."""
    return name in _OF_TENSORS or (
        hasattr(np.ndarray, name) and not name.startswith("_") and name not in _HAVE_NAMES_OF_MODULES
    )


def not_a_value(path: str, used: str, values: Sequence[str] = (), numbered: bool = False, then: str = "") -> str:
    """Return the message for a name that is used as a value.

    Args:
        path: the path of the place.
        used: the use of the name: "saved", "compared" …
        values: the names of the canonical values, if the place has canonical values.
        numbered: whether the place is a list of modules.
        then: the code after the value in the suggested code: ".mean()", "[0]".
    """
    name = written(path)
    if values:
        return f"{name} is a name for several values and no value itself, so it cannot be {used}; write {name}.{values[0]}{then}"
    if numbered:
        return (
            f"{name} is a name for a list of modules and no value, so it cannot be {used}; write {name}[0].output{then}"
        )
    return f"{name} is a name for a place in the model and no value, so it cannot be {used}; write {name}.output{then}"


def not_assigned(path: str) -> str:
    """Return the message for an assignment to a name instead of its value."""
    name = written(path)
    return f"{name} is a name for a place in the model and cannot be replaced; assign its value: {name}.output = …"


def read_only(path: str, name: str) -> str:
    """Return the message for a write to a weight."""
    module = written(path)
    return (
        f"{module}.{name} is read-only: requests of others compute with it. Change what the module gives, for example "
        f"{module}.output[:] += delta, or work on a copy: w = {module}.{name}.clone()"
    )


class Name(ABC):
    """Base class of envoys: an operation that only values have calls `_misused`, which raises."""

    __slots__ = ()

    @abstractmethod
    def _misused(self, used: str, then: str = "") -> NoReturn:
        """Raise the error for the use of the name as a value."""

    def save(self) -> NoReturn:
        """Raise the error for a save: a name has no value to save."""
        self._misused("saved", ".save()")

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", "a function of torch")
        _first((*args, *(kwargs or {}).values()))._misused(f"given to torch ({name})")

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        self._misused(f"given to numpy ({getattr(function, '__name__', 'a function')})")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._misused("made into an array")

    def __contains__(self, value: object) -> bool:
        if _is_number(value):
            self._misused("searched for a number")
        return any(value == one for one in self)  # type: ignore[attr-defined]

    @abstractmethod
    def _same(self, other: object) -> bool:
        """Whether another object is a name for the same place."""

    def __eq__(self, other: object) -> bool:
        if _is_number(other):
            self._misused("compared with numbers")
        return self._same(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    @abstractmethod
    def __hash__(self) -> int:
        """Return the hash, which is equal for all names of the same place."""

    def __bool__(self) -> bool:
        return True


def _first(values: Iterable[Any]) -> Name:
    for value in values:
        if isinstance(value, Name):
            return value
        if isinstance(value, list | tuple):
            inner = next((item for item in value if isinstance(item, Name)), None)
            if inner is not None:
                return inner
    raise TypeError("a name of the model is no tensor; write .output")


def _is_number(value: object) -> bool:
    """Whether a value is a number, or holds numbers like a tensor or an array."""
    if isinstance(value, Name):
        return False
    return (isinstance(value, numbers.Number) and not isinstance(value, bool)) or hasattr(value, "__array__")


def _refusing(used: str) -> Callable[..., NoReturn]:
    def operation(self: Name, *_: object) -> NoReturn:
        self._misused(used)

    return operation


for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_UNARY):
    setattr(Name, f"__{_name}__", _refusing("computed with"))
for _name in _ORDER:
    setattr(Name, f"__{_name}__", _refusing("compared"))
for _name in _NUMBERS:
    setattr(Name, f"__{_name}__", _refusing("made into a number"))
