"""Says without a trace whether a model gives a location: `model.serves("blocks[3].attn.q")`.

The server describes each model once, with the reasons for what it refuses. The verdict is read from that description.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from interpose.contract.errors import InvalidArgument, UnknownLocation
from interpose.contract.names import written
from interpose.modules.tree import PSEUDO, Node

_MOST = 500  # characters of a location
_PART = re.compile(r"\.?([A-Za-z_][A-Za-z0-9_]*)|\[(-?[0-9]{1,9})\]|\.([0-9]{1,9})(?![A-Za-z0-9_])")
_VALUES = ("output", "input", "inputs")
_EXAMPLE = 'write it as in a block: "blocks[3].attn.q" or "model.layers[2].output"'


@dataclass(frozen=True)
class Verdict:
    """Whether a model serves a location; it is true if the model does.

    Attributes:
        location: the location, as it was asked for.
        reason: why a trace is refused that reads it, and what to read instead; "" if it is served.
        shape: the shape of a canonical value, e.g. "[tokens, 4, 32]"; "" for other values.
    """

    location: str
    reason: str = ""
    shape: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def __repr__(self) -> str:
        if self.reason:
            return f"{self.location}: refused: {self.reason}"
        return f"{self.location}: {self.shape or 'served'}"


def verdict(root: Node, location: object) -> Verdict:
    """Return whether a model serves a location.

    Args:
        root: the model's tree.
        location: names as in a block, or the path of a module with a value. `model` is the variable, unless only a module of
            that name fits.

    Raises:
        InvalidArgument: the text is no location, or there is code after it.
    """
    names = _parts(location)
    found = _found(root, names[1:] if names[0] == "model" and len(names) > 1 else names)
    if names[0] == "model" and not isinstance(found, Verdict):
        other = _found(root, names)
        if isinstance(other, Verdict) or other[0] > found[0] + 1:
            found = other
    if isinstance(found, Verdict):
        return Verdict(str(location), found.reason, found.shape)
    return Verdict(str(location), found[1])


def _parts(location: object) -> list[str | int]:
    if not isinstance(location, str):
        raise InvalidArgument(f"a location is a str, not {type(location).__name__}; {_EXAMPLE}")
    if len(location) > _MOST:
        raise InvalidArgument(f"a location of {len(location)} characters; at most {_MOST} are read; {_EXAMPLE}")
    parts: list[str | int] = []
    at = 0
    while at < len(location):
        match = _PART.match(location, at)
        if match is None or (not parts and location[0] in ".[") or (parts and location[at] not in ".["):
            raise InvalidArgument(f"{location!r} is not a location; {_EXAMPLE}")
        name, index, number = match.groups()
        parts.append(int(index or number) if name is None else name)
        at = match.end()
    if not parts:
        raise InvalidArgument(f"an empty text is not a location; {_EXAMPLE}")
    return parts


def _found(root: Node, parts: list[str | int]) -> Verdict | tuple[int, str]:
    """Return the verdict, or how many parts exist and why the next does not.

    Raises:
        InvalidArgument: there is something after the value.
    """
    node = root
    for at, part in enumerate(parts):
        value = _value(node, part) if isinstance(part, str) else None
        if value is not None:
            if at + 1 < len(parts):
                named = f"{written(node.path)}.{part}"
                raise InvalidArgument(f"ask about a value, {named}, without what follows it", location=node.path)
            return value
        try:
            node = node.child(part)
        except UnknownLocation as error:
            why = node.refused.get(str(part), "") if node.canonical else ""
            return Verdict("", why) if why and at + 1 == len(parts) else (at, error.message)
    return len(parts), node.misused("asked about")


def _value(node: Node, name: str) -> Verdict | None:
    """Return the verdict of a value of a module; None if the name is none."""
    if name in node.values:
        return Verdict("", shape=node.values[name])
    if name in node.weights:
        return Verdict("")
    if node.canonical or name not in _VALUES:
        return None
    if node.path in PSEUDO and name != "output":
        return Verdict("", f"{node.path} has an output only; read {node.path}.output")
    return Verdict("", node.refused.get(name, ""))
