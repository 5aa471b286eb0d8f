"""Objects of the standard library that travel as a function and its arguments.

The table of such types is the same for sender and receiver. A function that is not in the table is neither sent nor called.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import re
import types
from collections.abc import Callable
from typing import Any

Parts = tuple[tuple[object, ...], dict[str, object]]


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _partial(function: Any, /, *args: Any, **keywords: Any) -> Any:
    return functools.partial(function, *args, **keywords)


# The arguments are dicts and lists only: hashing another object could run the sender's code, and a range may be endless.


def _deque(items: object, maxlen: int | None) -> Any:
    if type(items) is not list:
        raise TypeError("a list is needed")
    return collections.deque(items, maxlen)


def _default_dict(factory: Any, items: object) -> Any:
    if type(items) is not dict:
        raise TypeError("a dict is needed")
    return collections.defaultdict(factory, items)


def _counter(counts: object) -> Any:
    if type(counts) is not dict:
        raise TypeError("a dict is needed")
    return collections.Counter(counts)


def _pattern(pattern: str | bytes, flags: int) -> Any:
    return re.compile(pattern, flags)


def _cached_parts(obj: Any) -> Parts:
    parameters = obj.cache_parameters()
    return (obj.__wrapped__, parameters["maxsize"], parameters["typed"]), {}


def _reduced(obj: Any) -> Parts:
    made = obj.__reduce__()  # of the operator module's own types: (type, arguments), or with keywords a partial
    if isinstance(made[0], functools.partial):
        return (*made[0].args, *made[1]), dict(made[0].keywords)
    return tuple(made[1]), {}


def _named_tuple(name: str, fields: tuple[str, ...], defaults: tuple[object, ...]) -> Any:
    return collections.namedtuple(name, fields, defaults=defaults)


def _logger(name: str) -> Any:
    """Return a logger of the block's own, whose lines go nowhere."""
    made = logging.Logger(str(name)[:200])
    made.addHandler(logging.NullHandler())
    return made


_MAKERS: dict[str, Callable[..., Any]] = {
    "functools.partial": _partial,
    "functools.lru_cache": _cached,
    "collections.deque": _deque,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "collections.namedtuple": _named_tuple,
    "types.SimpleNamespace": types.SimpleNamespace,
    "re.compile": _pattern,
    "logging.getLogger": _logger,
    "operator.itemgetter": operator.itemgetter,
    "operator.attrgetter": operator.attrgetter,
    "operator.methodcaller": operator.methodcaller,
}
# By type: the name of the function that makes its objects, and their arguments.
_PARTS: dict[type, tuple[str, Callable[[Any], Parts]]] = {
    functools.partial: ("functools.partial", lambda obj: ((obj.func, *obj.args), dict(obj.keywords))),
    type(functools.lru_cache(maxsize=1)(len)): ("functools.lru_cache", _cached_parts),
    collections.deque: ("collections.deque", lambda obj: ((list(obj), obj.maxlen), {})),
    collections.defaultdict: ("collections.defaultdict", lambda obj: ((obj.default_factory, dict(obj)), {})),
    collections.Counter: ("collections.Counter", lambda obj: ((dict(obj),), {})),
    types.SimpleNamespace: ("types.SimpleNamespace", lambda obj: ((), dict(vars(obj)))),
    logging.Logger: ("logging.getLogger", lambda obj: ((obj.name,), {})),
    re.Pattern: ("re.compile", lambda obj: ((obj.pattern, obj.flags), {})),
    operator.itemgetter: ("operator.itemgetter", _reduced),
    operator.attrgetter: ("operator.attrgetter", _reduced),
    operator.methodcaller: ("operator.methodcaller", _reduced),
}


def takes(kind: type) -> bool:
    """Whether a type is in the table."""
    return kind in _PARTS


def parts_of(obj: object) -> tuple[str, str, Parts] | None:
    """Return module, name and arguments of the function that makes an object, else None."""
    if isinstance(obj, type):
        return _named_tuple_parts(obj)
    if type(obj) not in _PARTS:
        return None
    name, parts = _PARTS[type(obj)]
    module, _, function = name.rpartition(".")
    return module, function, parts(obj)


def _named_tuple_parts(cls: type) -> tuple[str, str, Parts] | None:
    """Return the parts of a class that `collections.namedtuple` made, else None."""
    fields, defaults = vars(cls).get("_fields"), vars(cls).get("_field_defaults")
    if cls.__bases__ != (tuple,) or not isinstance(fields, tuple) or not isinstance(defaults, dict):
        return None
    return "collections", "namedtuple", ((cls.__name__, fields, tuple(defaults.values())), {})


def make(module: str, name: str, args: tuple[object, ...], keywords: dict[str, object]) -> object:
    """Make an object from its function and arguments.

    Raises:
        ValueError: the function is not in the table, or the arguments do not fit.
    """
    maker = _MAKERS.get(f"{module}.{name}")
    if maker is None:
        raise ValueError(f"{module}.{name} is not among the functions that are called here")
    try:
        return maker(*args, **keywords)
    except Exception as error:
        raise ValueError(f"{module}.{name} does not take these arguments: {error}") from None
