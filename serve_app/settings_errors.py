"""Describes errors in settings: the place, the mistake, and names that are near."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from executor.core.engine_names import near
from serve_app.settings_file import SettingsFile

_MOST_INPUT = 60  # characters of a wrong value that a message repeats
_SECRET = ("api_key", "api_keys")


class SettingsError(ValueError):
    """Settings are wrong; the message has a line for each error.

    Attributes:
        problems: for each wrong setting its keys and indices, and what is wrong with it.
    """

    def __init__(self, message: str, problems: Sequence[tuple[tuple[str | int, ...], str]]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


def explain(
    error: ValidationError,
    model: type[BaseModel],
    given: Mapping[str, Any],
    file: SettingsFile | None = None,
    prefix: str = "",
) -> SettingsError:
    """Return an error that an operator can act on.

    Args:
        error: pydantic's error.
        model: the settings' class.
        given: the arguments of the caller, the strongest source of settings.
        file: the YAML file, the weakest source.
        prefix: the prefix of environment variables, the source in between; "" if they are not a source.
    """
    lines, problems = [], []
    for one in error.errors():
        place = one["loc"]
        name = one.get("ctx", {}).get("name")
        if name is not None:  # a validator of a whole mapping found the error at one key
            place = (*place, name)
        what = _what(dict(one), place, model)
        lines.append(_where(place, given, file, prefix) + what)
        problems.append((place, what))
    return SettingsError("\n".join(lines), problems)


def _what(one: dict[str, Any], place: Sequence[str | int], model: type[BaseModel]) -> str:
    if one["type"] == "extra_forbidden":
        return f"there is no such setting{near(str(place[-1]), _names_at(model, place[:-1]))}"
    what = str(one["msg"]).removeprefix("Value error, ")
    got = one.get("input")
    if one["type"].endswith(("_type", "_parsing", "literal_error")) and not {*place} & {*_SECRET}:
        text = repr(got)
        what += f"; it is {text if len(text) <= _MOST_INPUT else type(got).__name__}"
    return what


def _where(place: Sequence[str | int], given: Mapping[str, Any], file: SettingsFile | None, prefix: str) -> str:
    """Return where a setting was given, with a colon; "" for the settings as a whole."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if not place:
        return ""
    if _given(place, given):
        return f"{name}: "
    variable = next(_variables(place, prefix), None) if prefix else None
    if variable is not None:
        return f"{variable}: " if len(place) == variable.count("__") + 1 else f"{variable}: {name}: "
    return f"{file.path}:{file.line(place)}: {name}: " if file is not None else f"{name}: "


def _given(place: Sequence[str | int], values: Any) -> bool:
    for part in place:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _variables(place: Sequence[str | int], prefix: str) -> Iterator[str]:
    """Yield the environment variables that give a setting or contain it."""
    there = {name.upper(): name for name in os.environ}
    for length in range(len(place), 0, -1):
        name = (prefix + "__".join(map(str, place[:length]))).upper()
        if name in there:
            yield there[name]


def _names_at(model: type[BaseModel], place: Sequence[str | int]) -> set[str]:
    """Return the names of the settings at a place; an empty set where any name is allowed."""
    annotation: Any = model
    for part in place:
        if isinstance(part, int):
            annotation = next(iter(typing.get_args(annotation)), None)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel) and part in annotation.model_fields:
            annotation = annotation.model_fields[part].annotation
        else:
            return set()
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return set()
    return set(annotation.model_fields)
