"""What the contract with vLLM is made of: facts about its source, each with the reason why it matters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Import:
    """A module, class, function or value that is there under this dotted path."""

    path: str
    why: str


@dataclass(frozen=True)
class Method:
    """A method that a class of ours overrides; its parameters, but for `self` and their annotations, are exactly these."""

    path: str
    parameters: str
    why: str


@dataclass(frozen=True)
class Call:
    """A function, method or class that is called.

    Attributes:
        parameters: what is given by position, then, after `*`, what is given by name; with `**kwargs` other things are too.
    """

    path: str
    parameters: str
    why: str


@dataclass(frozen=True)
class Attributes:
    """Attributes that instances of a class have: its fields, properties, methods, or what its methods set on `self`."""

    cls: str
    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Exactly:
    """All names of one kind that a class has: another one needs a decision.

    Attributes:
        kind: "abstract" for methods that a subclass must have, "fields" for annotated names that do not begin with `_`.
    """

    cls: str
    kind: str
    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Source:
    """A behaviour that is recognised by texts in the source of a function, class or module, in this order.

    The source is compared as `ast.unparse` writes it, without comments, every run of white space being one space.
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
    """Entries that one part of the project needs.

    Attributes:
        name: of the part.
        folder: where the part is.
    """

    name: str
    folder: str
    entries: tuple[Entry, ...]


def size(entry: Entry) -> int:
    """Return how many facts an entry states: one, or one for each attribute."""
    return len(entry.names) if isinstance(entry, Attributes) else 1
