"""The page of the settings, from the classes that read them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from serve_app.settings import PREFIX, Settings
from serve_app.settings_model import GIB, MIB

_INTRODUCTION = f"""\
# Settings

`python -m tools.reference` writes this page from `serve_app/settings.py`, and a test holds it against them. A setting
comes from the YAML file of `interpose serve --config FILE`, from the environment, or from the command line; a later
place wins. In the environment `grpc.port` is `{PREFIX}GRPC__PORT`. Serve's own tools take the same settings as `args`
([serving](serving.md#serves-own-tools)). [serving.md](serving.md) and [operating.md](operating.md) say what they are
for.
"""
_MODELS = {
    "ModelSettings": "Each of `models`",
    "Tenant": "Each of `tenants`",
    "ApiKey": "Each of `api_keys`",
    "Limits": "`limits`",
}


def settings_page() -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION, *_section("The service", Settings, Settings.__doc__)]
    for kind, title in _classes():
        parts += _section(title, kind, kind.__doc__)
    return "\n".join(parts).rstrip() + "\n"


def _classes() -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the classes of the settings' parts, each once, with the titles of their sections."""
    seen: set[type[BaseModel]] = set()
    waiting = [Settings]
    while waiting:
        for name, field in waiting.pop(0).model_fields.items():
            kind = _part_in(field.annotation)
            if kind is not None and kind not in seen:
                seen.add(kind)
                waiting.append(kind)  # type: ignore[arg-type]
                yield kind, _MODELS.get(kind.__name__, f"`{name}`")


def _section(title: str, kind: type[BaseModel], text: str | None) -> Iterator[str]:
    first = (text or "").strip().split("\n\n")[0]
    yield f"## {title}\n"
    yield f"{' '.join(first.split())}\n"
    yield "| setting | is | default | what |"
    yield "| --- | --- | --- | --- |"
    for name, field in kind.model_fields.items():
        part = _part_in(field.annotation)
        what = field.description or ""
        if part is not None:
            title_of_part = _MODELS.get(part.__name__, f"`{name}`")
            what = f"{what}{'; ' if what else ''}see [{title_of_part}](#{_anchor(title_of_part)})"
        cells = (f"`{name}`", _is(field), _default(field, part), what)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _anchor(title: str) -> str:
    return title.lower().replace("`", "").replace(" ", "-")


def _part_in(annotation: Any) -> type[BaseModel] | None:
    """Return the class of settings in a field's type, e.g. of a tuple of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_part_in, typing.get_args(annotation))), None)


def _is(field: FieldInfo) -> str:
    bounds = [text for one in field.metadata for text in _bounds(one)]
    return ", ".join(filter(None, (_kind(field.annotation), *bounds)))


def _bounds(constraint: Any) -> Iterator[str]:
    for kind, sign in ((annotated_types.Ge, "≥"), (annotated_types.Gt, ">"), (annotated_types.Le, "≤")):
        if isinstance(constraint, kind):
            yield f"{sign} {_number(getattr(constraint, kind.__name__.lower()))}"


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(one for one in arguments if one is not type(None)))
    if origin is tuple:
        return "list"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _default(field: FieldInfo, part: type[BaseModel] | None) -> str:
    if field.is_required() or field.default is PydanticUndefined:
        return "needed" if field.is_required() else ""
    value = field.default
    if value is None or value in ("", ()) or part is not None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"{_number(value)}" if isinstance(value, int) else f"`{value}`"


def _number(value: float) -> str:
    """Return a number as people write it: 16 GiB, 9000, 20,000."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if value >= 16 << 10 and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value:,}" if value >= 20_000 else f"{value}"
