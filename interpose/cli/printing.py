"""What commands print: tables for people, and JSON for programs."""

from __future__ import annotations

import json
from typing import Any


def columns(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    """Return a table's lines, with columns as wide as their widest cell."""
    cells = [head, *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def duration(seconds: float) -> str:
    """Return seconds as hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def as_json(message: Any) -> str:
    """Return a message of the protocol as JSON with the protocol's names.

    Every field is there, also a field that is zero or empty. An enum is its name.
    """
    return json.dumps(_plain(message), indent=2, ensure_ascii=False)


def _plain(message: Any) -> dict[str, Any]:
    given = {field.name for field, _ in message.ListFields()}
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            several = not isinstance(value, str | bytes) and hasattr(value, "__len__")
            found[field.name] = [_scalar(field, one) for one in value] if several else _scalar(field, value)
        elif hasattr(value, "__len__"):
            found[field.name] = [_plain(one) for one in value]
        else:
            found[field.name] = _plain(value) if field.name in given else None
    return found


def _scalar(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.hex() if isinstance(value, bytes) else value
