"""What is wrong with a manifest, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """One mistake in one object.

    Attributes:
        where: kind, name and path in the object: `RayService/interpose spec.serveConfigV2`.
        message: what is wrong there.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class CannotValidate(Exception):
    """Something that validation needs is not here; the message says what, and where to get it."""


def named(document: Document) -> str:
    """Return `Kind/name` of an object."""
    return f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"


def at(document: Document, path: Iterable[str | int], message: str) -> Problem:
    """Return a problem at a path in an object."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return Problem(f"{named(document)} {text[1:]}".rstrip(), message)
