"""Versions of installed packages, and whether they fit what other packages ask for.

Only the standard library is here: the client does not depend on the package `packaging`.
"""

from __future__ import annotations

import importlib.metadata
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?")
_CLAUSE = re.compile(r"\s*(==|!=|>=|<=|~=|>|<)\s*([^\s,]+)\s*")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
_ORDER: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class Requirement:
    """A package that another package asks for.

    Attributes:
        name: the package.
        versions: which versions of it fit, e.g. ">=1.2,<2", or "" for any.
        extra: the extra that asks for it, or "".
    """

    name: str
    versions: str
    extra: str = ""


def installed(name: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def required_by(name: str) -> Iterator[Requirement]:
    """Yield what an installed package asks for; nothing if it is not installed."""
    try:
        lines = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        found = _REQUIREMENT.fullmatch(line)
        if found is not None:
            extra = _EXTRA.search(found[4] or "")
            yield Requirement(found[1], found[3].strip(), extra[1] if extra else "")


def pythons_of(name: str) -> str:
    """Return the versions of Python that an installed package takes, e.g. ">=3.11,<3.15", or ""."""
    try:
        found = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(found["Requires-Python"]) if "Requires-Python" in found else ""


def fits(version: str, wanted: str) -> bool:
    """Return whether a version is one of the wanted versions, e.g. of ">=1.2,<2".

    A local part, as in "2.13.0+cpu", counts where the wanted version has one.
    """
    return all(_clause_fits(version, *clause.groups()) for clause in _CLAUSE.finditer(wanted))


def _clause_fits(version: str, sign: str, wanted: str) -> bool:
    if sign in ("==", "!="):
        return _equal(version, wanted) is (sign == "==")
    has, asked = _numbers(version), _numbers(wanted)
    if sign == "~=":
        return has >= asked and has[: len(asked) - 1] == asked[:-1]
    length = max(len(has), len(asked))
    return _ORDER[sign](_padded(has, length), _padded(asked, length))


def _equal(version: str, wanted: str) -> bool:
    public = wanted.partition("+")[0]
    if public != wanted:
        return version == wanted
    has, asked = _numbers(version), _numbers(public.removesuffix(".*"))
    if public.endswith(".*"):
        return has[: len(asked)] == asked
    length = max(len(has), len(asked))
    return _padded(has, length) == _padded(asked, length) and _suffix(version) == _suffix(public)


def _suffix(version: str) -> str:
    """Return what follows the numbers of a version: of "1.2rc1+cpu" this is "rc1"."""
    return version.partition("+")[0].lstrip("0123456789.")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: of "2.13.0+cpu" these are 2, 13 and 0."""
    found = re.match(r"\d+(?:\.\d+)*", version.partition("+")[0])
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return numbers + (0,) * (length - len(numbers))
