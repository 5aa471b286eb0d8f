"""The kinds of entries of the contract with vLLM.

An entry is a fact about vLLM's source, with the reason why the project needs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Import:
    """A module, class, function or value that exists under this dotted path."""

    path: str
    why: str


@dataclass(frozen=True)
class Method:
    """A method that a class of the project overrides.

    Its parameters are exactly these, without `self` and without annotations.
    """

    path: str
    parameters: str
    why: str


@dataclass(frozen=True)
class Call:
    """A function, method or class that the project calls.

    Attributes:
        parameters: the positional arguments and, after `*`, the keyword arguments. With `**kwargs` there are further keyword
            arguments.
    """

    path: str
    parameters: str
    why: str


@dataclass(frozen=True)
class Attributes:
    """Attributes of a class's instances: fields, properties, methods, or names set on `self`."""

    cls: str
    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Exactly:
    """All names of one kind that a class has; a further name needs a decision.

    Attributes:
        kind: "abstract" for methods that a subclass must have, "fields" for annotated names that do not begin with `_`.
    """

    cls: str
    kind: str
    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Source:
    """A behaviour that is recognised by texts in vLLM's source, in this order.

    The source is that of a function, class or module. It is compared as `ast.unparse` writes it, without comments, with every
    run of white space as one space.
    """

    path: str
    contains: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Variable:
    """An environment variable that vLLM reads."""

    name: str
    why: str


Entry = Import | Method | Call | Attributes | Exactly | Source | Variable


@dataclass(frozen=True)
class Group:
    """The entries that one part of the project needs.

    Attributes:
        name: the name of the part.
        folder: where the part is.
    """

    name: str
    folder: str
    entries: tuple[Entry, ...]


def size(entry: Entry) -> int:
    """Return how many facts an entry states: one, or one for each attribute."""
    return len(entry.names) if isinstance(entry, Attributes) else 1
