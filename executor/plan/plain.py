"""Checks of the plain values of a plan from another process, and their tags.

A check takes a value, which may be anything, and returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

# Tags of what an argument names: an earlier result, or one of torch's constants.
NODE, DTYPE, FORMAT = "node", "dtype", "format"
INTEGERS = 1 << 63


class Unfit(ValueError):
    """A plan, as plain values, that no plan is."""


def unfit(what: str) -> NoReturn:
    """Refuse the plan."""
    raise Unfit(what)


def list_of(told: Any, most: int) -> list[Any]:
    """Return a list with a bounded number of items.

    Raises:
        Unfit: it is none.
    """
    if not isinstance(told, list) or len(told) > most:
        unfit("a list is none, or too long")
    return told


def dict_of(told: Any, most: int) -> dict[Any, Any]:
    """Return a dict with a bounded number of items.

    Raises:
        Unfit: it is none.
    """
    if not isinstance(told, dict) or len(told) > most:
        unfit("a dict is none, or too long")
    return told


def tuple_of(told: Any, kinds: tuple[type, ...]) -> Any:
    """Return a tuple whose items have exactly these types.

    Raises:
        Unfit: it is none.
    """
    if not isinstance(told, tuple) or len(told) != len(kinds):
        unfit("a tuple is none")
    for one, kind in zip(told, kinds, strict=True):
        if type(one) is not kind:
            unfit(f"a {type(one).__name__} in the place of a {kind.__name__}")
    return told


def index_of(told: Any, count: int) -> int:
    """Return a number from 0 that is less than a count.

    Raises:
        Unfit: it is none.
    """
    if type(told) is not int or not 0 <= told < count:
        unfit("a number is out of range")
    return told


def named_by(told: Any, tag: str, known: Mapping[str, Any]) -> Any:
    """Return what a value with a tag names.

    Raises:
        Unfit: it has another tag, or its name is unknown.
    """
    kind, name = tuple_of(told, (str, str))
    if kind != tag or name not in known:
        unfit(f"an argument is no {tag}")
    return known[name]


def _is_integer(told: Any) -> bool:
    return type(told) in (int, bool) and -INTEGERS <= told < INTEGERS


_FIT: dict[str, Callable[[Any], bool]] = {
    "bool": lambda told: type(told) is bool,
    "int": _is_integer,
    "float": lambda told: type(told) is float or _is_integer(told),
    "number": lambda told: type(told) is float or _is_integer(told),
    "str": lambda told: type(told) is str and told in ("trunc", "floor", "none", "tanh"),
}


def fits(kind: str, told: Any) -> bool:
    """Return whether a value may be an argument of a kind.

    Args:
        kind: as an operation's schema names it: "bool", "int", "float", "number", "str".
        told: the value.
    """
    return kind in _FIT and _FIT[kind](told)
