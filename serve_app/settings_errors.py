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
        keys = one["loc"]
        name = one.get("ctx", {}).get("name")
        if name is not None:  # a validator of a whole mapping found the error at one key
            keys = (*keys, name)
        what = _what(dict(one), keys, model)
        lines.append(_where(keys, given, file, prefix) + what)
        problems.append((keys, what))
    return SettingsError("\n".join(lines), problems)


def _what(one: dict[str, Any], keys: Sequence[str | int], model: type[BaseModel]) -> str:
    if one["type"] == "extra_forbidden":
        return f"there is no such setting{near(str(keys[-1]), _names_at(model, keys[:-1]))}"
    what = str(one["msg"]).removeprefix("Value error, ")
    got = one.get("input")
    if one["type"].endswith(("_type", "_parsing", "literal_error")) and not {*keys} & {*_SECRET}:
        text = repr(got)
        what += f"; it is {text if len(text) <= _MOST_INPUT else type(got).__name__}"
    return what


def _where(keys: Sequence[str | int], given: Mapping[str, Any], file: SettingsFile | None, prefix: str) -> str:
    """Return where a setting was given, with a colon; "" for the settings as a whole."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in keys).lstrip(".")
    if not keys:
        return ""
    if _given(keys, given):
        return f"{name}: "
    variable = next(_variables(keys, prefix), None) if prefix else None
    if variable is not None:
        return f"{variable}: " if len(keys) == variable.count("__") + 1 else f"{variable}: {name}: "
    return f"{file.path}:{file.line(keys)}: {name}: " if file is not None else f"{name}: "


def _given(keys: Sequence[str | int], values: Any) -> bool:
    for part in keys:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _variables(keys: Sequence[str | int], prefix: str) -> Iterator[str]:
    """Yield the environment variables that give a setting or contain it."""
    there = {name.upper(): name for name in os.environ}
    for length in range(len(keys), 0, -1):
        name = (prefix + "__".join(map(str, keys[:length]))).upper()
        if name in there:
            yield there[name]


def _names_at(model: type[BaseModel], keys: Sequence[str | int]) -> set[str]:
    """Return the names of the settings at a place; an empty set where any name is allowed."""
    annotation: Any = model
    for part in keys:
        if isinstance(part, int):
            annotation = next(iter(typing.get_args(annotation)), None)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel) and part in annotation.model_fields:
            annotation = annotation.model_fields[part].annotation
        else:
            return set()
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return set()
    return set(annotation.model_fields)
