"""Texts and HTML for a notebook: tables, and entries that fold.

All text of others is escaped: a token, a name or a module of a served model may be `<script>`. Only this module makes tags.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

MOST_SHOWN = 100  # rows of a table
MOST_OF_A_CELL = 60  # characters
_CELL = "text-align: left; white-space: pre-wrap; vertical-align: top"


def escaped(value: object) -> str:
    """Return the text of a value for HTML."""
    return html.escape(str(value), quote=True)


def code(value: object) -> str:
    """Return the text of a value as code."""
    return f"<code>{escaped(value)}</code>"


def folded(title: str, body: str, *, opened: bool = False) -> str:
    """Return an entry that shows its body when it is clicked.

    Args:
        title, body: HTML.
        opened: whether the body shows at first.
    """
    return f"<details{' open' if opened else ''}><summary>{title}</summary><div style='margin-left: 1.5em'>{body}</div></details>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells are HTML."""
    made = ["<table>"]
    if head:
        made.append("<tr>" + "".join(f'<th style="{_CELL}">{cell}</th>' for cell in head) + "</tr>")
    made += ["<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows]
    return "".join([*made, "</table>"])


def facts(rows: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    return table((), [(f"<b>{escaped(name)}</b>", escaped(value)) for name, value in rows.items()])


def shortened(values: Sequence[object], most: int) -> str:
    """Return a list as text with at most `most` entries."""
    if len(values) <= most:
        return repr(list(values))
    return f"[{', '.join(map(repr, values[:most]))}, … {len(values) - most} more]"


class Table(tuple[Mapping[str, object], ...]):
    """Rows that print as a text and show as a table in a notebook; each row is a dict by column.

    Attributes:
        title: the line above the rows.
    """

    title: str

    @classmethod
    def of(cls, title: str, rows: Iterable[Mapping[str, object]]) -> Table:
        """Return a table of rows."""
        made = cls(rows)
        made.title = title
        return made

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(dict.fromkeys(name for row in self for name in row))

    def __repr__(self) -> str:
        cells = [self.columns, *([_short(_cell(row.get(name))) for name in self.columns] for row in self)]
        if not self:
            return f"{self.title}: none"
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{escaped(self.title)}: none</p>"
        rows = [[_html_cell(row.get(name)) for name in self.columns] for row in self[:MOST_SHOWN]]
        rest = f"<p>… {len(self) - MOST_SHOWN} more</p>" if len(self) > MOST_SHOWN else ""
        return f"<p>{escaped(self.title)}</p>{table([escaped(name) for name in self.columns], rows)}{rest}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple | dict) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= MOST_OF_A_CELL else f"{text[: MOST_OF_A_CELL - 1]}…"


def _html_cell(value: object) -> str:
    """Return a value as HTML: a long text folds.

    Unfolded, a mapping shows its values too.
    """
    text = _cell(value)
    if len(text) <= MOST_OF_A_CELL:
        return escaped(text)
    entries = [f"{name}: {one}" for name, one in value.items()] if isinstance(value, Mapping) else value
    body = (
        "".join(f"<div>{escaped(one)}</div>" for one in entries) if isinstance(entries, list | tuple) else escaped(text)
    )
    return folded(escaped(_short(text)), body)


def size(nbytes: int) -> str:
    """Return a number of bytes for reading, e.g. "1.5 MiB"."""
    amount = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{nbytes} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
