"""A name of the model is no value: what is done with a name and only a value can be raises, and says what to write.

`model.logits` names a place, `model.logits.output` is the tensor there. Both sides have envoys that stand for names, the
notebook and the worker; each refuses in its own way, with the same words.
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
# What a tensor has and an array of numpy has not.
_OF_TENSORS = (
    "abs add argsort backward bfloat16 bool cat chunk clone contiguous cpu cuda detach device div double eq expand flatten float "
    "gather grad half index_select int is_cuda item log log_softmax long masked_fill matmul mm mul norm numel numpy permute "
    "relu requires_grad requires_grad_ retain_grad sigmoid softmax sqrt squeeze sub tanh tolist topk type unsqueeze view where "
    "zero_"
).split()
_HAVE_NAMES_OF_MODULES = ("T", "data", "real", "imag", "base", "flags")  # attributes that say too little


def written(path: str) -> str:
    """Return what a block writes to name a place, e.g. "model.model.layers[2].mlp" for "model.layers.2.mlp"."""
    parts = path.split(".") if path else []
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def of_tensors(name: str) -> bool:
    """Whether an attribute is a tensor's, so that code that asks a name for it takes the name for its value."""
    return name in _OF_TENSORS or (
        hasattr(np.ndarray, name) and not name.startswith("_") and name not in _HAVE_NAMES_OF_MODULES
    )


def not_a_value(path: str, used: str, values: Sequence[str] = (), numbered: bool = False, then: str = "") -> str:
    """Say that a name is used as a value, and what to write instead.

    Args:
        path: of the place.
        used: what was done with it: "saved", "compared" …
        values: of a place of canonical values, their names.
        numbered: whether it is a list of modules.
        then: what follows the value in what to write instead: ".mean()", "[0]".
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
    """Say that something was assigned to a name itself, and what to write instead."""
    name = written(path)
    return f"{name} is a name for a place in the model and cannot be replaced; assign its value: {name}.output = …"


def read_only(path: str, name: str) -> str:
    """Say that a weight was written to, and what to write instead."""
    module = written(path)
    return (
        f"{module}.{name} is read-only: requests of others compute with it. Change what the module gives, for example "
        f"{module}.output[:] += delta, or work on a copy: w = {module}.{name}.clone()"
    )


class Name(ABC):
    """Base of envoys: operations that only values have raise what `_misused` raises."""

    __slots__ = ()

    @abstractmethod
    def _misused(self, used: str, then: str = "") -> NoReturn:
        """Raise the error for a use of the name as a value."""

    def save(self) -> NoReturn:
        """Refuse: there is no value to save."""
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
        """Whether another object is a name of the same place."""

    def __eq__(self, other: object) -> bool:
        if _is_number(other):
            self._misused("compared with numbers")
        return self._same(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    @abstractmethod
    def __hash__(self) -> int:
        """Names of one place have one hash."""

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
    """Whether a value is a number, or holds numbers as a tensor or an array does."""
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
